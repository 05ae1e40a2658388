"""Tokens at the end of a cache whose groups nobody needs yet.

With routing per head a token's own groups say nothing while every head that reads groups has it in its window. They
are found later, for many tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .heads import HeadRouters, key_scores


class Unrouted:
    """The last tokens of a cache layer in plain storage, each new one the only one of its call.

    Args:
        found: int64 ``(B, P, S)``, the groups of all tokens before them.
        routers: of the ``P`` heads.
        room: so many tokens may come.
    """

    def __init__(self, found: Tensor, routers: HeadRouters, room: int) -> None:
        self._first, self._routers, self._room = found.shape[-1], routers, room
        self._numbers = F.pad(found, (0, room))
        self._hidden_states: list[Tensor] = []

    @property
    def shape(self) -> tuple[int, int]:
        """``B``, and how many tokens there are in all, those that came before included."""
        return self._numbers.shape[0], self._first + len(self._hidden_states)

    def takes(self, routers: HeadRouters, window: int) -> bool:
        """Whether one more token may come that is routed by these, and this window then holds all that have come."""
        return routers is self._routers and len(self._hidden_states) < min(self._room, window + 1)

    def append(self, hidden_states: Tensor) -> Tensor:
        """Take in a token.

        Args:
            hidden_states: ``(B, 1, d)``; not copied.

        Returns:
            int64 ``(B, P, tokens in all)``, the groups of tokens that came before, and any group for the others.
        """
        self._hidden_states.append(hidden_states)
        return self._numbers.narrow(-1, 0, self.shape[1])

    @torch.no_grad()
    def find(self) -> Tensor:
        """The groups of all tokens: int64 ``(B, P, tokens in all)``."""
        found = self._numbers[..., : self._first]
        if not self._hidden_states:
            return found
        own = key_scores(torch.cat(self._hidden_states, dim=1), self._routers).argmax(dim=-1)
        return torch.cat([found, own.transpose(1, 2)], dim=-1)

    def __deepcopy__(self, memo: Any) -> Unrouted:
        """With a list of its own; tensors are not written to, and routers are the adapter's."""
        copy = Unrouted.__new__(Unrouted)
        copy.__dict__ = {**self.__dict__, "_hidden_states": list(self._hidden_states)}
        return copy
