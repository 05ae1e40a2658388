"""Attention weights of one query head, spelled out: kernels never build them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..adapter import Seen


def scores_of(seen: Seen, query_head: int, rows: slice, columns: slice) -> Tensor:
    """Scores of some queries over some keys of a call for one sequence, float32 ``(Q, S)``."""
    how, key_head = seen.scores, query_head * seen.key.shape[1] // seen.query.shape[1]
    scores = (seen.query[0, query_head, rows].float() @ seen.key[0, key_head, columns].float().T) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    bias = how.part(rows, columns).bias
    return scores if bias is None else scores + bias[0, min(query_head, bias.shape[1] - 1)].float()


def softmax_over(seen: Seen, query_head: int, scores: Tensor, pairs: Tensor) -> Tensor:
    """Weights of these scores over the pairs that are attended, bool ``(Q, S)``."""
    scores, sinks = scores.masked_fill(~pairs, float("-inf")), seen.scores.sink_logits
    if sinks is not None:  # takes part in the softmax, and is no token
        column = sinks[query_head].float().expand(len(scores), 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1)[:, : pairs.shape[1]]
