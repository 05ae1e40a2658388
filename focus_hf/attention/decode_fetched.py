"""Attention of new tokens against a cache whose pages are in host memory (`host_tier`): fetch, attend, merge."""

from __future__ import annotations

import torch
from torch import Tensor

from .host_tier import Fetched, TieredPool
from .kernels import Kernel, Pages
from .masked import masked_with_lse
from .merge import merge
from .problem import Scores
from .store import GroupedStore

#: New tokens: keys ``(B, H_kv, Q, D)``, values ``(B, H_kv, Q, D_v)``, codes ``(B, Q)``, positions of all columns
#: ``(B, S)``, and in how many groups each is.
New = tuple[Tensor, Tensor, Tensor, Tensor, int | None]


@torch.compiler.disable
def attend_pieces(
    store: GroupedStore, pool: TieredPool, query: Tensor, new: New, scores: Scores, kernel: Kernel
) -> Tensor:
    """Attention of new tokens, which are then part of the store; as many at a time as its ring takes.

    Args:
        store: what was cached before them.
        pool: its pool.
        query: ``(B, H, Q, D)``.
        new: the tokens.
        scores: plain ones.
        kernel: the backend; its kernel that follows page tables is used for single tokens, if it has one.

    Returns:
        ``(B, H, Q, D_v)``, zeros for padding.
    """
    key, value, codes, columns, groups_each = new
    num_queries, outputs = query.shape[2], []
    before = columns.shape[1] - num_queries
    for start in range(0, num_queries, store.spare):
        own = slice(start, min(start + store.spare, num_queries))
        store.append(key[:, :, own], value[:, :, own], codes[:, own], columns[:, : before + own.stop], groups_each)
        positions = columns[:, before + own.start : before + own.stop]
        output, lse = _attend(store, pool, query[:, :, own].transpose(1, 2), positions, codes[:, own], scores, kernel)
        if scores.sink_logits is not None:
            output = output * torch.sigmoid(lse - scores.sink_logits.to(lse.dtype))[..., None]
        outputs.append(output.to(query.dtype))
    return torch.cat(outputs, dim=1).transpose(1, 2)


def _attend(
    store: GroupedStore,
    pool: TieredPool,
    query: Tensor,
    positions: Tensor,
    codes: Tensor,
    scores: Scores,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Of tokens that the ring has taken in: ``(B, Q, H, D_v)`` and logsumexp ``(B, Q, H)``."""
    reads, visible = store.reads(positions, codes), store.visible(positions, codes, store.recent)
    whole: tuple[Tensor, Tensor] | None = None
    for fetched in pool.fetch(reads.any(dim=1)):
        index = fetched.lists[:, None].expand(-1, query.shape[1], -1)
        reads_page = reads.gather(2, index).logical_and_((fetched.lengths > 0)[:, None])
        if query.shape[1] == 1 and kernel.paged is not None and pool.keys.shape[-1] == pool.values.shape[-1]:
            tables = fetched.pages[..., None]
            pages = Pages(visible[:, 0], reads_page[:, 0], fetched.lengths, tables, pool.page)
            one, its_lse = kernel.paged(query[:, 0], pool.keys, pool.values, pages, scores.scale)
            part = one[:, None], its_lse[:, None]
        else:
            part = _under_mask(pool, query, store.recent, visible, fetched, reads_page, scores.scale)
        whole = part if whole is None else merge(*whole, *part)
        visible = torch.zeros_like(visible)  # met once
    assert whole is not None
    return whole


def _under_mask(
    pool: TieredPool,
    query: Tensor,
    recent: slice,
    visible: Tensor,
    fetched: Fetched,
    reads_page: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Recent slots and fetched pages side by side."""
    rows, place = torch.arange(query.shape[0], device=query.device)[:, None], torch.arange(pool.page)
    in_page = place.to(query.device) < fetched.lengths[..., None]
    pairs = torch.cat([visible, (reads_page[..., None] & in_page[:, None]).flatten(2)], dim=2)
    key, value = (
        torch.cat([x[:, recent], x.unflatten(1, (-1, pool.page))[rows, fetched.pages].flatten(1, 2)], dim=1)
        for x in (pool.keys.transpose(1, 2), pool.values.transpose(1, 2))
    )
    return masked_with_lse(query, key, value, pairs, scale)
