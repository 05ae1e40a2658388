"""One layer, fitted: its router and what it reads and loses under every threshold; a file for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..attention import Pattern
from ..files import write_atomically
from ..routing.cells import CellRouter, key_groups
from .clusters import cluster_keys
from .curves import HeadCurves, measure, octave
from .importance import LayerWindow, cell_importance
from .lower_cost import lower_cost
from .query_router import train_query_router
from .recipe import FitRecipe

#: Of the steps, those that rank cells by importance; the others lower the cost itself.
_RANKING = 0.5


@dataclass(frozen=True)
class LayerFit:
    """A fitted layer.

    Args:
        router: float32 numbers that float16 holds; offsets 0, since they are chosen over all layers.
        curves: of its heads, on windows that it was not fitted to.
    """

    router: CellRouter
    curves: HeadCurves


@torch.no_grad()
def fit_layer(
    read: Callable[[int], LayerWindow], fit_on: Sequence[int], measure_on: Sequence[int], recipe: FitRecipe, seed: int
) -> LayerFit:
    """Fit one layer to some windows, and measure its curves on others; ``read`` gives a window by its number."""
    generator, pattern = torch.Generator().manual_seed(seed), recipe.focus_config().pattern
    windows = [read(number) for number in fit_on]
    keys = torch.cat([window.plain_keys for window in windows], dim=1)
    grouping = cluster_keys(keys, recipe.num_groups, recipe.group_dim, generator)
    del keys
    often = evenly_often(torch.cat([window.positions for window in windows]))
    own_heads = [list(window.seen_by(len(grouping.centroids))) for window in windows]
    ranking = round(_RANKING * recipe.steps)
    routers = []
    for head, seen in enumerate(zip(*own_heads, strict=True)):  # one by one: the cells of all queries are many
        router = grouping.of_heads(head, 1)
        choosers = seen[0].queries.shape[0] if recipe.each_query_head else 1
        importance = torch.cat([_importance(window, router, pattern, choosers) for window in seen], dim=1)
        queries = torch.cat([_side_by_side(window, choosers) for window in seen], dim=1)
        ranked = train_query_router(router, queries, importance, often, ranking, generator)
        del importance, queries
        routers.append(lower_cost(ranked, seen, pattern, often, recipe.steps - ranking, generator))
    router = CellRouter(*map(torch.cat, zip(*(router.tensors().values() for router in routers), strict=True)))
    return LayerFit(router, measure(map(read, measure_on), router, pattern))


def evenly_often(positions: Tensor) -> Tensor:
    """How often to draw each query so that all octaves of positions, from 512 on, teach as much: float32 ``(N,)``.

    Most windows are short, so that few queries have anything far away; in a long context most have.
    """
    octaves = octave(positions.clamp(min=256))
    return octaves.bincount().reciprocal()[octaves]


def _side_by_side(window: LayerWindow, choosers: int) -> Tensor:
    """The ``r`` queries of each chooser side by side: ``(choosers, R, r D)``."""
    return window.queries.unflatten(0, (choosers, -1)).transpose(1, 2).flatten(-2)


def _importance(window: LayerWindow, router: CellRouter, pattern: Pattern, choosers: int) -> Tensor:
    """How much each cell, and "near", matters to each kept query of a KV head: ``(choosers, R, K * bands + 1)``."""
    groups, num_groups = key_groups(window.plain_keys[None], router)[0, 0], router.centroids.shape[1]
    return torch.stack([cell_importance(seen, groups, pattern, num_groups) for seen in window.seen_by(choosers)])


def save_layer(fit: LayerFit, path: Path, made_from: str) -> None:
    """Write a fitted layer, and what stands for the text, the model and the recipe that it was made from."""
    tensors = {f"router.{name}": tensor for name, tensor in fit.router.tensors().items()}
    tensors |= {f"curves.{name}": tensor for name, tensor in vars(fit.curves).items()}
    write_atomically(path, save(tensors, metadata={"made_from": made_from}))


def load_layer(path: Path, made_from: str) -> LayerFit | None:
    """Read a fitted layer; ``None`` if there is none, or it was made from something else."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("made_from") != made_from:
                return None
            router = CellRouter(**{f.name: file.get_tensor(f"router.{f.name}") for f in fields(CellRouter)})
            curves = HeadCurves(**{f.name: file.get_tensor(f"curves.{f.name}") for f in fields(HeadCurves)})
    except SafetensorError:
        return None  # cut short or of another version: it is fitted again
    return LayerFit(router, curves)
