"""The exact two-call decomposition of hard Focus attention: cost follows the number of attended pairs.

A. pairs that share a group: gather each group's tokens, in order, and run causal attention inside it;
B. local pairs that share no group: a sliding window;
then merge the two by their logsumexp. A and B are disjoint, so nothing is counted twice.

Sinks belong to every group, which is the same function as "every later token may attend to them" (a sink
itself only sees other sinks).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import flash_attention, merge
from .mask import PADDING, Pattern, share_a_group

#: Queries per block of the sliding window; small blocks waste few keys outside the window.
WINDOW_BLOCK = 32

#: A pair lowered by this much, after scaling, has a softmax weight of exactly 0 in float32.
PENALTY = 4096.0


def grouped_focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    memberships: Tensor,
    scale: float,
) -> Tensor:
    """Hard Focus attention over whole sequences (prefill without a cache). Inference only, CPU.

    Equal to `masked_focus_attention` up to rounding. Memory is linear in ``T``.

    Args:
        query: ``(B, H, T, D)``.
        key: ``(B, H_kv, T, D)``.
        value: ``(B, H_kv, T, D_v)``, ``D_v <= D``.
        pattern: window and sinks.
        positions: ``(B, T)`` integers: 0, 1, 2, ... over a sequence's tokens, ``PADDING`` for padding anywhere.
        memberships: ``(B, T, K)`` bool; every token that is not padding belongs to at least one group.
        scale: factor on ``q . k``.

    Returns:
        ``(B, H, T, D_v)`` in the dtype of ``query``; zeros for padding.
    """
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for row in range(query.shape[0]):
        real = (positions[row] != PADDING).nonzero().squeeze(-1)
        if real.numel() == 0:
            continue
        tokens = slice(None) if real.numel() == query.shape[2] else real
        output[row, :, tokens] = _attend_sequence(
            query[row, :, tokens],
            key[row, :, tokens],
            value[row, :, tokens],
            pattern,
            memberships[row, tokens],
            scale,
        ).to(output.dtype)
    return output


def _attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, memberships: Tensor, scale: float
) -> Tensor:
    """One sequence without padding: ``(H, T, D)``, ``(H_kv, T, D)``, ``(H_kv, T, D_v)``, ``(T, K)``."""
    if pattern.sink_tokens > 0:
        memberships = memberships.clone()
        memberships[: pattern.sink_tokens] = True
    same_group = _attend_within_groups(query, key, value, memberships, pattern.sink_tokens, scale)
    window = _attend_window(query, key, value, memberships, pattern.local_window, scale)
    return merge(*same_group, *window)[0]


def _attend_within_groups(
    query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, sink_tokens: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Call A. A token in several groups meets some tokens more than once; in group ``c`` the pairs that share a
    lower-numbered group already are penalised away, so every pair counts once."""
    num_heads, length, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.zeros(num_heads, length, value.shape[-1], dtype=lse_dtype)
    lse = torch.full((num_heads, length), float("-inf"), dtype=lse_dtype)
    # Sinks are in every group, but see the same keys (each other) in each: any group's result will do.
    one_group_each = bool((memberships[sink_tokens:].sum(dim=-1) <= 1).all())
    for group in range(memberships.shape[-1]):
        tokens = memberships[:, group].nonzero().squeeze(-1)
        if tokens.numel() == 0:
            continue
        q, k, v = query[:, tokens], key[:, tokens], value[:, tokens]
        if group > 0 and not one_group_each:
            q, k = _penalise_shared(q, k, memberships[tokens, :group], scale)
        part, part_lse = flash_attention(q[None], k[None], v[None], scale, causal=True)
        if one_group_each:
            output[:, tokens], lse[:, tokens] = part[0].to(lse_dtype), part_lse[0]
        else:
            output[:, tokens], lse[:, tokens] = merge(output[:, tokens], lse[:, tokens], part[0], part_lse[0])
    return output, lse


def _penalise_shared(query: Tensor, key: Tensor, memberships: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Lengthen the heads so that ``q . k`` falls by ``PENALTY / scale`` for each group two tokens share.

    Args:
        query: ``(H, T, D)``.
        key: ``(H_kv, T, D)``.
        memberships: ``(T, C)`` bool, the groups to penalise.
        scale: factor that the scores will get.

    Returns:
        Query and key with ``D`` grown to the next multiple of 8 (kernels prefer that).
    """
    # Half of the penalty on each side, as a power of two: exact in bf16, in range for fp16.
    magnitude = 2.0 ** min(math.ceil(math.log2(PENALTY / scale) / 2), 15)
    head_dim, extra = query.shape[-1], memberships.shape[-1]
    width = -(-(head_dim + extra) // 8) * 8 - head_dim
    columns = F.pad(memberships.to(query.dtype), (0, width - extra)) * magnitude
    return (
        torch.cat([query, -columns.expand(query.shape[0], -1, -1)], dim=-1),
        torch.cat([key, columns.expand(key.shape[0], -1, -1)], dim=-1),
    )


def _attend_window(
    query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, local_window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Call B: pairs with ``0 <= i - j <= w`` that share no group, in blocks of queries.

    Block ``n`` holds queries ``n * WINDOW_BLOCK ...`` and sees the ``w`` keys before it and its own: overlapping
    views of one padded tensor, nothing is copied per block.
    """
    length = query.shape[1]
    num_blocks = -(-length // WINDOW_BLOCK)
    tail = num_blocks * WINDOW_BLOCK - length
    span = local_window + WINDOW_BLOCK
    blocked_query = F.pad(query, (0, 0, 0, tail)).unflatten(1, (num_blocks, WINDOW_BLOCK)).transpose(0, 1)
    padded_key, padded_value = (F.pad(x, (0, 0, local_window, tail)) for x in (key, value))
    blocked_key, blocked_value = (
        x.unfold(1, span, WINDOW_BLOCK).permute(1, 0, 3, 2) for x in (padded_key, padded_value)
    )

    q_groups = F.pad(memberships, (0, 0, 0, tail)).unflatten(0, (num_blocks, WINDOW_BLOCK))
    k_groups = F.pad(memberships, (0, 0, local_window, tail)).unfold(0, span, WINDOW_BLOCK).transpose(1, 2)
    q_index = torch.arange(WINDOW_BLOCK)[:, None] + local_window
    k_index = torch.arange(span)[None, :]
    first_key = torch.arange(num_blocks)[:, None, None] * WINDOW_BLOCK - local_window
    in_window = (k_index <= q_index) & (q_index - k_index <= local_window) & (first_key + k_index >= 0)
    allowed = in_window & ~share_a_group(q_groups, k_groups)
    bias = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, torch.finfo(query.dtype).min)

    output, lse = flash_attention(blocked_query, blocked_key, blocked_value, scale, bias=bias[:, None])
    # Rows without a pair would take part in the merge with the kernel's stand-in value.
    lse = lse.masked_fill(~allowed.any(dim=-1)[:, None], float("-inf"))
    return (
        output.transpose(0, 1).flatten(1, 2)[:, :length],
        lse.transpose(0, 1).flatten(1, 2)[:, :length],
    )
