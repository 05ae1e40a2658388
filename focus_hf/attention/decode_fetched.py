"""Attention of new tokens against a cache whose pages are in host memory (`host_tier`): fetch, attend, merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .host_tier import Fetched, TieredPool
from .kernels import Kernel, Pages
from .masked import masked_with_lse
from .merge import merge
from .problem import Scores
from .store import GroupedStore


@dataclass(frozen=True)
class New:
    """New tokens, as `GroupedStore.append` takes them."""

    keys: Tensor
    values: Tensor
    codes: Tensor
    columns: Tensor
    groups_each: int | None

    def enter(self, store: GroupedStore, start: int = 0, stop: int | None = None) -> None:
        """Some of them, or all, become part of a store."""
        count, own = self.keys.shape[2], slice(start, stop)
        seen = self.columns.shape[1] - count + (count if stop is None else stop)
        keys, values = self.keys[:, :, own], self.values[:, :, own]
        store.append(keys, values, self.codes[:, own], self.columns[:, :seen], self.groups_each)


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
    num_queries, outputs = query.shape[2], []
    positions = new.columns[:, new.columns.shape[1] - num_queries :]
    for start in range(0, num_queries, store.spare):
        own = slice(start, min(start + store.spare, num_queries))
        new.enter(store, own.start, own.stop)
        some = query[:, :, own].transpose(1, 2), positions[:, own], new.codes[:, own]
        output, lse = _attend(store, pool, *some, scores, kernel)
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
    reads, visible = store.reads(positions, codes), store.visible(positions, codes)
    whole: tuple[Tensor, Tensor] | None = None
    for fetched in pool.fetch(reads.any(dim=1)):
        index = fetched.lists[:, None].expand(-1, query.shape[1], -1)
        reads_page = reads.gather(2, index).logical_and_((fetched.lengths > 0)[:, None])
        if query.shape[1] == 1 and kernel.paged is not None and pool.keys.shape[-1] == pool.values.shape[-1]:
            recent = store.recent.keys, store.recent.values
            facts = reads_page[:, 0], fetched.lengths, fetched.pages[..., None], store.places, pool.page
            pages = Pages(recent, visible[:, 0], (pool.keys, pool.values), *facts)
            one, its_lse = kernel.paged(query[:, 0], pages, scores.scale)
            part = one[:, None], its_lse[:, None]
        else:
            part = _under_mask(store, pool, query, visible, fetched, reads_page, scores.scale)
        whole = part if whole is None else merge(*whole, *part)
        visible = torch.zeros_like(visible)  # met once
    assert whole is not None
    return whole


def _under_mask(
    store: GroupedStore,
    pool: TieredPool,
    query: Tensor,
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
        torch.cat([ring, x.unflatten(1, (-1, pool.page))[rows, fetched.pages].flatten(1, 2)], dim=1)
        for ring, x in (
            (store.recent.keys[:, :, 1:].transpose(1, 2), pool.keys.transpose(1, 2)),
            (store.recent.values[:, :, 1:].transpose(1, 2), pool.values.transpose(1, 2)),
        )
    )
    return masked_with_lse(query, key, value, pairs, scale)
