"""Groups of keys that stand in the rows of an engine's memory: a cache of a function, by what the rows hold.

Engines copy, move, share and overwrite rows as they like. A row's groups hold as long as the key in it is the one that
they were found for; a key that has moved is found again by its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..remembered import hashes

#: Calls whose overwritten rows are kept.
_ASIDE = 4096


class GroupTable:
    """Groups of the keys in so many rows.

    Args:
        rows: of the engine's memory.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._owner: object = None
        self._hashes: Tensor | None = None
        self._groups: Tensor | None = None
        #: What was overwritten: an engine may have put it aside, and bring it back.
        self._aside: list[tuple[Tensor, Tensor]] = []

    def put(self, rows: Tensor, keys: Tensor, groups: Tensor, owner: object) -> None:
        """Groups of keys that have just been written.

        Args:
            rows: ``(n,)``.
            keys: ``(n, H_kv, D)``, as the engine keeps them.
            groups: ``(n, ...)``.
            owner: whose groups they are.
        """
        if self._owner != owner or self._groups is None or self._groups.shape[1:] != groups.shape[1:]:
            self._owner = owner
            self._hashes = torch.zeros(self._rows, dtype=torch.int64, device=keys.device)
            self._groups = groups.new_full((self._rows, *groups.shape[1:]), -1)
            self._aside = []
        assert self._hashes is not None
        before = self._hashes[rows]
        self._aside = [*self._aside[-_ASIDE:], (before, self._groups[rows])]
        self._hashes[rows], self._groups[rows] = hashes(keys.transpose(0, 1)[None])[0], groups

    def get(self, rows: Tensor, keys: Tensor, owner: object) -> Tensor | None:
        """Groups of the keys that are in rows now: ``(n, ...)``, -1 where nobody knows; ``None``: of nobody's.

        Arguments as for `put`.
        """
        if self._owner != owner or self._groups is None or self._hashes is None:
            return None
        asked = hashes(keys.transpose(0, 1)[None])[0]
        groups, moved = self._groups[rows], self._hashes[rows] != asked
        if bool(moved.any()):
            everywhere = torch.cat([self._hashes, *(seen for seen, _ in self._aside)])
            of_them = torch.cat([self._groups, *(kept for _, kept in self._aside)])
            known, order = everywhere.sort()
            place = torch.searchsorted(known, asked[moved]).clamp(max=known.shape[0] - 1)
            found = of_them[order[place]]
            missing = known[place] != asked[moved]
            groups[moved] = torch.where(missing.view(-1, *(1,) * (found.dim() - 1)), -1, found)
        return groups
