"""Which cell of a query each key is in, and sums over cells.

A cell is a group at a distance (`focus_hf.routing.cells`). Cells are numbered as in `CellRouter.cell_bias`: group by
group, within a group band by band, and last "near", which is the window, the sinks, and whatever comes later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import Pattern


def cells_of_keys(groups: Tensor, positions: Tensor, pattern: Pattern, num_groups: int) -> Tensor:
    """The cell of each key, as each query sees it.

    Args:
        groups: integers ``(T,)``.
        positions: of the queries, int64 ``(R,)``.
        pattern: window, sinks and bands.
        num_groups: ``K``.

    Returns:
        int64 ``(R, T)``.
    """
    near = num_groups * pattern.num_bands
    bands = _bands_before(positions, len(groups), pattern)
    cells = torch.where(bands < 0, near, groups.long() * pattern.num_bands + bands)
    cells[:, : pattern.sink_tokens] = near
    return cells


def _bands_before(positions: Tensor, length: int, pattern: Pattern) -> Tensor:
    """The band of each key, and -1 if it is near: int64 ``(R, T)``, rows that are cut out of one table."""
    last = int(positions.max())
    distances = torch.arange(last, -length, -1)
    table = torch.bucketize(distances, torch.tensor(pattern.band_starts())) - 1
    return table.unfold(0, length, 1)[last - positions]


def sums_by_cell(values: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Sums over the keys of each cell: ``(..., R, T)`` to ``(..., R, cells)``."""
    sums = values.new_zeros(*values.shape[:-1], num_cells)
    return sums.scatter_add_(-1, cells.expand_as(values), values)
