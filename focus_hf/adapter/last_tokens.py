"""Tokens at the end of a cache that no query looks up: each that reads groups has them in its window.

So what queries look up is made for the tokens before, and made anew for many tokens at once, not at every one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import GroupRows, Pattern
from .heads import HeadRouters, key_scores


class LastTokens(ABC):
    """The last tokens of a cache layer in plain storage, each new one the only one of its call.

    Args:
        found: int64 ``(B, P * k, S)``, the groups of all tokens before them.
        window: the narrowest of all queries that read groups.
    """

    def __init__(self, found: Tensor, window: int) -> None:
        self._found, self._window = found, window
        self._tokens: list[Tensor] = []

    @property
    def shape(self) -> tuple[int, int]:
        """``B``, and how many tokens there are in all, those that came before included."""
        return self._found.shape[0], self._found.shape[-1] + len(self._tokens)

    @property
    def has_room(self) -> bool:
        """Whether one more token may come: the window of its query then holds all that have come."""
        return len(self._tokens) <= self._window

    def append(self, token: Tensor) -> None:
        """Take in a token, ``(B, 1, ...)``; not copied."""
        self._tokens.append(token)

    @torch.no_grad()
    def find(self) -> Tensor:
        """The groups of all tokens: int64 ``(B, P * k, tokens in all)``."""
        if not self._tokens:
            return self._found
        return torch.cat([self._found, self._groups(torch.cat(self._tokens, dim=1)).transpose(1, 2)], dim=-1)

    @abstractmethod
    def _groups(self, tokens: Tensor) -> Tensor:
        """Of tokens ``(B, T, ...)``: int64 ``(B, T, P * k)``."""

    def __deepcopy__(self, memo: Any) -> LastTokens:
        """With a list of its own; tensors are not written to, and routers are the adapter's."""
        copy = type(self).__new__(type(self))
        copy.__dict__ = {**self.__dict__, "_tokens": list(self._tokens)}
        return copy


class Unrouted(LastTokens):
    """With routing per head: a token's own groups say nothing as long as it is in every window, so nobody asks.

    Its tokens are hidden states.

    Args:
        found: int64 ``(B, P, S)``.
        routers: of the ``P`` heads.
        window: see `LastTokens`.
    """

    def __init__(self, found: Tensor, routers: HeadRouters, window: int) -> None:
        super().__init__(found, window)
        self._routers = routers
        self._numbers: Tensor | None = None

    def takes(self, routers: HeadRouters, window: int) -> bool:
        """Whether one more token may come that is routed by these, with this window."""
        return routers is self._routers and window == self._window and self.has_room

    @property
    def numbers(self) -> Tensor:
        """int64 ``(B, P, tokens in all)``, the groups of tokens that came before, and any group for the others."""
        if self._numbers is None:  # not before: a dense context needs none, and its window may be any length
            self._numbers = F.pad(self._found, (0, self._window + 1))
        return self._numbers.narrow(-1, 0, self.shape[1])

    def _groups(self, tokens: Tensor) -> Tensor:
        return key_scores(tokens, self._routers).argmax(dim=-1)


class Routed(LastTokens):
    """With shared routing: a token reads its own groups, so they are known. Its tokens are their numbers.

    Args:
        found: int64 ``(B, k, S)``.
        num_groups: ``K``.
        pattern: of all heads.
    """

    def __init__(self, found: Tensor, num_groups: int, pattern: Pattern) -> None:
        super().__init__(found, pattern.local_window)
        self._num_groups, self._pattern = num_groups, pattern
        self._rows: GroupRows | None = None

    def takes(self, top_k: int, pattern: Pattern) -> bool:
        """Whether one more token may come that is in so many groups, with this pattern."""
        return top_k == self._found.shape[1] and pattern == self._pattern and self.has_room

    @property
    def rows(self) -> GroupRows:
        """What queries of each group look up, for all that may come, too."""
        if self._rows is None:
            self._rows = GroupRows(self._found, self._num_groups, self._pattern)
        return self._rows

    def _groups(self, tokens: Tensor) -> Tensor:
        return tokens
