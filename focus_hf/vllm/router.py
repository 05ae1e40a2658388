"""The groups of new tokens in one attention layer, and what they read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import routing
from ..adapter import FocusConfig
from ..adapter.dial import thresholds
from ..adapter.routers import Routed, by_ranking, rank_groups
from ..attention import Pattern
from ..routing.cells import CellRouter, cell_reads, key_groups


class LayerRouter:
    """How one layer routes: what stands beside each token's keys, and who attends by it.

    Args:
        pattern: window, sinks, dense start, bands.
        needs_hidden: groups are made of hidden states, not of keys.
    """

    pattern: Pattern
    needs_hidden = False

    def groups(self, hidden_states: Tensor | None, key: Tensor, positions: Tensor) -> Tensor:
        """Of new tokens: integers ``(T, columns)``, what is to be remembered.

        Args:
            hidden_states: ``(T, d)``, what enters the attention module, where that is needed.
            key: ``(T, H_kv, D)``, positions applied.
            positions: ``(T,)``.
        """
        raise NotImplementedError

    def route(self, query: Tensor, known: Tensor, positions: Tensor) -> Routed:
        """The routing of requests.

        Args:
            query: ``(R, H, Q, D)``.
            known: what is remembered of their keys, ``(R, S, columns)``.
            positions: of the keys, ``(R, S)``; the last are the queries.
        """
        raise NotImplementedError


class SharedRouter(LayerRouter):
    """One routing for all heads, made of hidden states."""

    needs_hidden = True

    def __init__(self, config: FocusConfig, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors, self.pattern = config, tensors, config.pattern

    def groups(self, hidden_states: Tensor | None, key: Tensor, positions: Tensor) -> Tensor:
        assert hidden_states is not None, "the layer's hook has not seen this call"
        own = self.tensors
        temperature = self.config.temperature
        scores = routing.group_scores(hidden_states, own["focus_proj"], own["focus_centroids"], temperature)
        return rank_groups(scores, own["focus_balance"].float())

    def route(self, query: Tensor, known: Tensor, positions: Tensor) -> Routed:
        return by_ranking(known, self.config, query.shape[2], complete=True)


class CellsRouter(LayerRouter):
    """Each key/value head by itself, made of its keys and queries.

    Args:
        config: of the adapter.
        router: the tensors of the heads that this process has.
        rotary: vLLM's rotary positions of the layer, if it has any.
    """

    def __init__(self, config: FocusConfig, router: CellRouter, rotary: Any) -> None:
        self.config, self.router, self.pattern = config, router, config.pattern
        self.rotary = None if rotary is None else Rotary.of(rotary)

    def groups(self, hidden_states: Tensor | None, key: Tensor, positions: Tensor) -> Tensor:
        plain = key if self.rotary is None else self.rotary.turned_back(key, positions)
        return key_groups(plain.transpose(0, 1)[None], self.router)[0].T

    def route(self, query: Tensor, known: Tensor, positions: Tensor) -> Routed:
        asked = positions[:, -query.shape[2] :]
        threshold = thresholds(self.config, asked)
        reads = cell_reads(query, asked, self.router, threshold, self.config.local_window)
        return known.transpose(1, 2), reads, None


class NoRouter(LayerRouter):
    """A layer that the adapter leaves alone: it attends to everything."""

    pattern = Pattern(local_window=2**31 - 1, sink_tokens=0)

    def groups(self, hidden_states: Tensor | None, key: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(key.shape[0], 1, dtype=torch.uint8, device=key.device)

    def route(self, query: Tensor, known: Tensor, positions: Tensor) -> Routed:
        nothing = torch.zeros(query.shape[0], 1, query.shape[2], 1, 1, dtype=torch.bool, device=query.device)
        return known.transpose(1, 2), nothing, None


@dataclass(frozen=True)
class Rotary:
    """vLLM's rotary positions, as far as keys have to be turned back.

    Args:
        table: cosines and sines of all positions side by side, ``(positions, n)``.
        halves: pairs of numbers are one from each half of the ``n`` (GPT-NeoX's way), not neighbours.
    """

    table: Tensor
    halves: bool

    @classmethod
    def of(cls, module: Any) -> Rotary:
        """Of vLLM's module."""
        return cls(module.cos_sin_cache, bool(module.is_neox_style))

    def turned_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``(T, H_kv, D)`` before positions were applied to them, float32."""
        cos, sin = self.table.to(keys.device)[positions].float().chunk(2, dim=-1)
        square = cos.square() + sin.square()  # 1, but where lengths are scaled, too
        cos, sin = (cos / square)[:, None], (sin / square)[:, None]
        width, keys = 2 * cos.shape[-1], keys.float()
        own, rest = keys[..., :width], keys[..., width:]
        one, other = own.chunk(2, dim=-1) if self.halves else (own[..., ::2], own[..., 1::2])
        one, other = one * cos + other * sin, other * cos - one * sin
        back = torch.cat([one, other], dim=-1) if self.halves else torch.stack([one, other], dim=-1).flatten(-2)
        return torch.cat([back, rest], dim=-1)


def part_of(router: CellRouter, kv_heads: int, part: tuple[int, int]) -> CellRouter:
    """The tensors of the heads of one of several processes.

    Args:
        router: of all heads.
        kv_heads: that this process has.
        part: which of how many parts these are.

    Raises:
        ValueError: heads are not split evenly.
    """
    total = router.centroids.shape[0]
    if kv_heads == total:
        return router
    if kv_heads * part[1] != total:
        raise ValueError(
            f"{total} key/value heads over {part[1]} processes: use a number of processes that divides it."
        )
    own = slice(part[0] * kv_heads, (part[0] + 1) * kv_heads)
    return replace(router, **{name: tensor[own] for name, tensor in vars(router).items()})
