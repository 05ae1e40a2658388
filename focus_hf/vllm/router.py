"""The groups of new tokens in one attention layer, and what they read, in few operations.

What is the same in all layers of a step (angles, limits) is made once, by the first layer that asks for it. The
projections of a router are one matrix here, from a key or query to all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..adapter import FocusConfig
from ..adapter.dial import limits
from ..adapter.routers import set_dtype
from ..attention import Pattern, cell_reads
from ..routing import sets
from ..routing.cells import CellRouter
from ..routing.shared import balanced_scores


@dataclass(eq=False)
class Step:
    """The new tokens of a step, and what layers make of them in common.

    Args:
        slots: integers ``(T,)``, where the new tokens' keys go.
        positions: integers ``(T,)``, of the new tokens.
    """

    slots: Tensor
    positions: Tensor
    _made: dict[Hashable, Tensor] = field(default_factory=dict)

    def once(self, what: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives, made by the first layer that asks for it."""
        found = self._made.get(what)
        if found is None:
            found = self._made[what] = make()
        return found


class LayerRouter:
    """How one layer routes: the group that stands beside each token's key, and who attends by it.

    Args:
        pattern: window, sinks, dense start, bands.
        columns: groups of a token: one for each key/value head, or one for all of them; 0 where nobody reads any.
        dtype: of a group.
        needs_hidden: groups are made of hidden states, not of keys.
    """

    pattern: Pattern
    columns = 0
    dtype = torch.uint8
    needs_hidden = False

    def groups(self, hidden_states: Tensor | None, key: Tensor, step: Step) -> Tensor:
        """Of new tokens: integers ``(T, columns)``.

        Args:
            hidden_states: ``(T, d)``, what enters the attention module, where that is needed.
            key: ``(T, H_kv, D)``, positions applied.
            step: of these tokens.
        """
        raise NotImplementedError

    def reads(self, query: Tensor, groups: Tensor, step: Step) -> Tensor:
        """What new tokens read: bool ``(T, columns, K, bands)``.

        Args:
            query: ``(T, H, D)``, positions applied.
            groups: of these tokens, from `groups`.
            step: of these tokens.
        """
        raise NotImplementedError

    def memberships(self, groups: Tensor) -> Tensor | None:
        """In which groups tokens are, where the routing is shared: bool ``(..., K)`` from groups ``(...)``."""
        return None


class SharedRouter(LayerRouter):
    """One routing for all heads, made of hidden states: a token's set of groups has a number."""

    needs_hidden = True
    columns = 1

    def __init__(self, config: FocusConfig, tensors: dict[str, Tensor]) -> None:
        self.config, self.pattern = config, config.pattern
        self.projection, self.centroids = (tensors[f"focus_{name}"].float() for name in ("proj", "centroids"))
        self.balance, device = tensors["focus_balance"].float(), tensors["focus_balance"].device
        self.members = sets.members(config.num_groups, config.top_k, device)
        self.meeting = sets.meeting(config.num_groups, config.top_k, device)[..., None]
        self.dtype = set_dtype(config)

    def groups(self, hidden_states: Tensor | None, key: Tensor, step: Step) -> Tensor:
        assert hidden_states is not None, "the layer's hook has not seen this call"
        temperature = self.config.temperature
        scores = balanced_scores(hidden_states, self.projection, self.centroids, temperature, self.balance)
        if self.config.top_k == 1:
            return scores.argmax(dim=-1, keepdim=True).to(self.dtype)
        best = scores.topk(self.config.top_k).indices
        return sets.set_numbers(best, self.config.num_groups)[..., None].to(self.dtype)

    def reads(self, query: Tensor, groups: Tensor, step: Step) -> Tensor:
        return self.meeting[groups.int()]

    def memberships(self, groups: Tensor) -> Tensor:
        return self.members[groups.int()]


class CellsRouter(LayerRouter):
    """Each key/value head by itself, made of its keys and queries; see `focus_hf.routing.cells`.

    Args:
        config: of the adapter.
        router: the tensors of the heads that this process has.
        rotary: vLLM's rotary positions of the layer, if it has any.
    """

    def __init__(self, config: FocusConfig, router: CellRouter, rotary: Rotary | None) -> None:
        self.config, self.pattern, self.rotary = config, config.pattern, rotary
        self.columns = router.centroids.shape[0]
        by_key = torch.matmul(router.centroids, router.key_projection)
        self.by_key = (by_key if rotary is None else rotary.of_turned(by_key)).transpose(1, 2).contiguous()
        self.balance = router.balance[:, None]
        self.router = router

    def groups(self, hidden_states: Tensor | None, key: Tensor, step: Step) -> Tensor:
        keys, rotary = key.float(), self.rotary
        if rotary is not None:
            angles = step.once(("angles", id(rotary.table)), lambda: rotary.angles(step.positions))
            keys = (keys[:, :, None] * angles[:, None]).flatten(2)
        scores = torch.baddbmm(self.balance, keys.transpose(0, 1), self.by_key)
        return scores.argmax(dim=-1).T.to(self.dtype)

    def reads(self, query: Tensor, groups: Tensor, step: Step) -> Tensor:
        limit = step.once("limit", lambda: limits(self.config, step.positions[None]))
        return cell_reads(query.transpose(0, 1)[None], self.router, limit)[0].transpose(0, 1)


class NoRouter(LayerRouter):
    """A layer that the adapter leaves alone: it attends to everything."""

    pattern = Pattern(local_window=2**31 - 1, sink_tokens=0)


@dataclass(frozen=True)
class Rotary:
    """vLLM's rotary positions, as far as keys have to be turned back.

    A key that was turned is, before that, ``cos * key + turn(sin * key)``, and what is linear in the one is linear in
    the two products: `of_turned` of a matrix goes with `angles` of positions.

    Args:
        table: cosines and sines of all positions side by side, ``(positions, n)``.
        halves: pairs of numbers are one from each half of the ``n`` (GPT-NeoX's way), not neighbours.
        head_size: ``D``, at least ``n``.
    """

    table: Tensor
    halves: bool
    head_size: int

    def angles(self, positions: Tensor) -> Tensor:
        """By which keys are multiplied: float32 ``(T, 2, D)``."""
        both = self.table.to(positions.device)[positions].double().unflatten(-1, (2, -1))
        both = both / both.square().sum(dim=-2, keepdim=True)  # 1, but where lengths are scaled, too
        both = both.repeat(1, 1, 2) if self.halves else both.repeat_interleave(2, dim=-1)
        rest = torch.zeros(*both.shape[:2], self.head_size - both.shape[-1], dtype=both.dtype, device=both.device)
        rest[:, 0] = 1
        return torch.cat([both, rest], dim=-1).float()

    def of_turned(self, matrix: Tensor) -> Tensor:
        """A matrix ``(..., D)`` on keys as one on keys times `angles`, ``(..., 2 D)``."""
        width = self.table.shape[-1]
        own, rest = matrix[..., :width], matrix[..., width:]
        one, other = own.chunk(2, dim=-1) if self.halves else (own[..., ::2], own[..., 1::2])
        pair = (-other, one)
        turned = torch.cat(pair, dim=-1) if self.halves else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat([matrix, turned, torch.zeros_like(rest)], dim=-1)


def bytes_of_groups(config: FocusConfig, kv_heads: int) -> int:
    """Bytes of the groups of a token in one layer: one for each key/value head, or for all of them, or two for all."""
    return kv_heads if config.by_cells else set_dtype(config).itemsize
