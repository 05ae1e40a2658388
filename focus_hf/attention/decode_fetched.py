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
    store: GroupedStore, query: Tensor, positions: Tensor, asked: Tensor, new: New, scores: Scores, kernel: Kernel
) -> Tensor:
    """Attention of new tokens, which are then part of the store; as many at a time as its ring takes.

    Args:
        store: what was cached before them; its pool is a `TieredPool`.
        query: ``(R, H, Q, D)``.
        positions: ``(R, Q)``.
        asked: ``(R, Q)``, codes of the groups that they read.
        new: the tokens.
        scores: plain ones.
        kernel: the backend; its kernel that follows page tables is used for single tokens, if it has one.

    Returns:
        ``(R, H, Q, D_v)``, zeros for padding.
    """
    outputs = []
    for start in range(0, query.shape[2], store.spare):
        some = slice(start, min(start + store.spare, query.shape[2]))
        new.enter(store, some.start, some.stop)
        outputs.append(_attend(store, query[:, :, some], positions[:, some], asked[:, some], scores, kernel))
    return torch.cat(outputs, dim=2)


def _attend(
    store: GroupedStore, query: Tensor, positions: Tensor, asked: Tensor, scores: Scores, kernel: Kernel
) -> Tensor:
    """Of tokens that the ring has taken in."""
    pool = store.pool
    assert isinstance(pool, TieredPool)
    single = query.shape[2] == 1 and kernel.paged is not None and pool.keys.shape[-1] == pool.values.shape[-1]
    attend = _paged if single else _under_mask
    queries, visible = query.transpose(1, 2), store.visible(positions, asked)
    reads = store.reads(positions, asked)
    whole: tuple[Tensor, Tensor] | None = None
    for fetched in pool.fetch(reads.any(dim=1)):
        of_pages = reads.gather(2, fetched.lists[:, None].expand(-1, reads.shape[1], -1))
        of_pages = of_pages.logical_and_((fetched.lengths > 0)[:, None])
        part = attend(store, queries, visible, fetched, of_pages, scores.scale, kernel)
        whole = part if whole is None else merge(*whole, *part)
        visible = torch.zeros_like(visible)  # met once
    assert whole is not None
    output, lse = whole
    if scores.sink_logits is not None:
        output = output * torch.sigmoid(lse - scores.sink_logits.to(lse.dtype))[..., None]
    return output.transpose(1, 2).to(query.dtype)


#: Output ``(R, Q, H, D_v)`` and logsumexp ``(R, Q, H)``.
_Part = tuple[Tensor, Tensor]


def _paged(
    store: GroupedStore, query: Tensor, visible: Tensor, fetched: Fetched, reads: Tensor, scale: float, kernel: Kernel
) -> _Part:
    """One query of each row; each page is a list of its own."""
    recent, pool = store.recent, store.pool
    pages = Pages(
        (recent.keys, recent.values),
        visible[:, 0],
        (pool.keys, pool.values),
        reads[:, 0],
        fetched.lengths,
        fetched.pages[..., None],
        store.rows.places,
        pool.page,
    )
    assert kernel.paged is not None
    output, lse = kernel.paged(query[:, 0], pages, scale)
    return output[:, None], lse[:, None]


def _under_mask(
    store: GroupedStore, query: Tensor, visible: Tensor, fetched: Fetched, reads: Tensor, scale: float, kernel: Kernel
) -> _Part:
    """Recent slots and fetched pages side by side."""
    recent, pool, place = store.recent, store.pool, store.rows.places.clamp(min=0)
    token = torch.arange(pool.page, device=query.device)
    in_page = (token < fetched.lengths[..., None])[place]
    reads = reads[place] & (store.rows.places >= 0)[:, None, None]
    pairs = torch.cat([visible, (reads[..., None] & in_page[:, None]).flatten(2)], dim=2)
    pages = place[:, None], fetched.pages[place]
    key, value = (
        torch.cat([own[:, 1:], x.unflatten(1, (-1, pool.page))[pages].flatten(1, 2)], dim=1)
        for own, x in (
            (recent.keys.transpose(1, 2), pool.keys.transpose(1, 2)),
            (recent.values.transpose(1, 2), pool.values.transpose(1, 2)),
        )
    )
    return masked_with_lse(query, key, value, pairs, scale)
