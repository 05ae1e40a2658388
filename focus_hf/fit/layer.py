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
from .curves import HeadCurves, measure
from .importance import LayerWindow, cell_importance
from .query_router import train_query_router
from .recipe import FitRecipe


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
    router = cluster_keys(keys, recipe.num_groups, recipe.group_dim, generator)
    del keys
    importance = torch.cat([_importance(window, router, pattern) for window in windows], dim=1)
    queries = torch.cat([_side_by_side(window) for window in windows], dim=1)
    router = train_query_router(router, queries, importance, recipe.steps, generator)
    return LayerFit(router, measure(map(read, measure_on), router, pattern))


def _side_by_side(window: LayerWindow) -> Tensor:
    """The ``r`` queries of each key/value head side by side: ``(n, R, r D)``."""
    return window.queries.unflatten(0, (len(window.keys), -1)).transpose(1, 2).flatten(-2)


def _importance(window: LayerWindow, router: CellRouter, pattern: Pattern) -> Tensor:
    """How much each cell, and "near", matters to each kept query of a window: ``(n, R, K * bands + 1)``."""
    heads = zip(window.heads(), key_groups(window.plain_keys[None], router)[0], strict=True)
    num_groups = router.centroids.shape[1]
    return torch.stack([cell_importance(head, groups, pattern, num_groups) for head, groups in heads])


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
