"""One layer, fitted: its routing and what every way of attending costs its heads; a file for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..files import write_atomically
from .costs import Cost, Option, option_costs
from .importance import DenseRows
from .recipe import FitRecipe
from .routers import Routers, fit_routers
from .store import LayerWindow

#: Costs of the options of every head, in the order of heads.
Costs = list[dict[Option, Cost]]


@dataclass(frozen=True)
class LayerFit:
    """A layer's routing and costs.

    Args:
        routers: of all its KV heads; ``None`` if groups were not wanted.
        costs: by the length of the windows on which they were measured.
        recall: likewise, what options do to recall: half the mean square by which log-odds of recalled tokens change,
            for each of them (see `recall`); for the lengths for which it was wanted.
    """

    routers: Routers | None
    costs: dict[int, Costs]
    recall: dict[int, Costs] = field(default_factory=dict)


def fit_layer(
    read: Callable[[int], LayerWindow],
    fit_on: Sequence[int],
    measure_on: Mapping[int, Sequence[int]],
    recipe: FitRecipe,
    seed: int,
    recall_on: Mapping[int, Sequence[int]] | None = None,
    fitted: LayerFit | None = None,
) -> LayerFit:
    """Fit one layer.

    Args:
        read: gives a window by its number.
        fit_on: numbers of the windows to fit the routing to.
        measure_on: by length, the numbers of the windows to measure costs on.
        recipe: how.
        seed: of this layer.
        recall_on: likewise, numbers of the windows with copies.
        fitted: the layer, if all that is missing is what options do to recall.
    """

    def costs_on(places: Mapping[int, Sequence[int]], routers: Routers | None) -> dict[int, Costs]:
        return {length: measure(map(read, numbers), routers, recipe, length) for length, numbers in places.items()}

    if fitted is not None:
        return replace(fitted, recall=fitted.recall | costs_on(recall_on or {}, fitted.routers))
    routers = None
    if recipe.groups:
        generator = torch.Generator().manual_seed(seed)
        routers = fit_routers([read(number) for number in fit_on], recipe, generator)
    return LayerFit(routers, costs_on(measure_on, routers), costs_on(recall_on or {}, routers))


@torch.no_grad()
def measure(windows: Any, routers: Routers | None, recipe: FitRecipe, length: int) -> Costs:
    """What every option costs each head, over windows of one length."""
    options = recipe.options(length)
    sums: list[dict[Option, list[float]]] = []
    queries = possible = 0
    for window in windows:
        sums = sums or [{option: [0.0, 0.0] for option in options} for _ in range(window.num_heads)]
        queries, possible = queries + len(window.positions), possible + int((window.positions + 1).sum())
        groups = torch.zeros(window.num_heads, len(window.hidden), dtype=torch.long)
        scores = window.hidden.new_zeros(window.num_heads, len(window.positions), 1)
        if routers is not None:
            groups = routers.key_groups(window.hidden)
            scores = routers.query_scores(window.hidden[window.positions])
        for number, so_far in enumerate(sums):
            done = 0
            for rows in map(DenseRows.of, window.head(number).parts()):
                these = slice(done, done := done + len(rows.positions))
                found = option_costs(
                    rows, options, recipe.sink_tokens, groups[number, : rows.length], scores[number, these]
                )
                for option, amounts in found.items():
                    so_far[option] = [total + more for total, more in zip(so_far[option], amounts, strict=True)]
    return [
        {option: Cost(fisher / (2 * queries), pairs / possible) for option, (fisher, pairs) in of_head.items()}
        for of_head in sums
    ]


def save_layer(fit: LayerFit, path: Path, made_from: str) -> None:
    """Write a fitted layer.

    Args:
        fit: the layer.
        path: of the file.
        made_from: what stands for the text, the model and the recipe.
    """
    tensors = {} if fit.routers is None else {f.name: getattr(fit.routers, f.name) for f in fields(Routers)}
    notes = {"costs": _written(fit.costs), "recall": _written(fit.recall), "made_from": made_from}
    write_atomically(path, save(tensors, metadata=notes))


def _written(costs: Mapping[int, Costs]) -> str:
    numbers = {
        length: [[[o.local_window, o.top_k, c.loss, c.pairs] for o, c in of_head.items()] for of_head in heads]
        for length, heads in costs.items()
    }
    return json.dumps(numbers)


def _read(written: str) -> dict[int, Costs]:
    return {
        int(length): [{Option(w, k): Cost(loss, pairs) for w, k, loss, pairs in of_head} for of_head in heads]
        for length, heads in json.loads(written).items()
    }


def load_layer(path: Path, made_from: str) -> LayerFit | None:
    """Read a fitted layer; ``None`` if there is none, or it was made from something else."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if notes.get("made_from") != made_from:
            return None
        routers = Routers(**tensors) if tensors else None
        return LayerFit(routers, _read(notes["costs"]), _read(notes.get("recall", "{}")))
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None  # cut short or of another version: it is fitted again
