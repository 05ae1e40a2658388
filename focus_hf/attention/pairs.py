"""How many pairs attention computes, of how many: what sparsity can save."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .definition import WhoAttends, attended_pairs, dense_pairs, one_head


def count_pairs(who: WhoAttends, chunk: int = 1024) -> tuple[Tensor, int]:
    """Pairs that each chooser attends to (`focus_hf.routing.cells`) and pairs possible (`dense_pairs`), of all rows.

    Their ratio is the most that sparsity can save.

    Args:
        who: the tokens.
        chunk: queries looked at together; bounds memory at ``B * H_c * chunk * S`` bytes.

    Returns:
        int64 ``(H_c,)``, and how many are possible for each.
    """
    is_plain = who.documents is None and who.extra_mask is None and who.key_groups.dtype == torch.uint8
    if is_plain and who.first_position is not None:
        return _count_by_cells(who, who.first_position, chunk)
    attended = torch.zeros(who.reads.shape[1], dtype=torch.int64)
    possible = 0
    for start in range(0, who.num_queries, chunk):
        rows = slice(start, start + chunk)
        attended += attended_pairs(who, rows).sum(dim=(0, 2, 3)).cpu()
        possible += int(dense_pairs(who, rows).sum())
    return attended, possible


def _count_by_cells(who: WhoAttends, first: int, chunk: int) -> tuple[Tensor, int]:
    """Of rows that are one sequence each, from position ``first`` on: keys are counted by cell, no pair is seen."""
    reads, groups, pattern = one_head(who.reads), one_head(who.key_groups), who.pattern
    (batch, _, queries, num_groups, _), length = reads.shape, groups.shape[2]
    window, sinks, dense = pattern.local_window, max(pattern.sink_tokens - first, 0), pattern.dense_below - first
    query = torch.arange(length - queries, length, device=reads.device)
    near = query.clamp(max=window) + 1 + (query - window).clamp(min=0, max=sinks)
    near = torch.where(query < dense, query + 1, near)
    reads = reads & (query >= dense)[:, None, None]
    edges = [window, *pattern.band_starts()[1:], length]
    heads = max(reads.shape[1], groups.shape[1])
    attended = near.sum().cpu() * batch + torch.zeros(heads, dtype=torch.int64)
    for row in range(batch):
        for head in range(heads):
            own, of_keys = (x[row, head * x.shape[1] // heads] for x in (reads, groups))
            # Of each group, its keys before each token, sinks left out.
            before = torch.zeros(length + 1, num_groups, dtype=torch.int32, device=reads.device)
            before[sinks + 1 :] = one_hot(of_keys.long(), num_groups)[sinks:].cumsum(dim=0)
            for places, some in zip(query.split(chunk), own.split(chunk), strict=True):
                counts = [before[(places - edge).clamp(min=0)] for edge in edges]
                for band, (nearer, farther) in enumerate(pairwise(counts)):
                    attended[head] += int(((nearer - farther) * some[..., band]).sum())
    return attended.expand(who.reads.shape[1]).clone(), int((query + 1).sum()) * batch
