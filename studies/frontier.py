"""Loss against pairs, as a fit estimates it: groups and windows, budgets per head and one setting for all heads.

A fit keeps for every head what each window and each number of groups costs (`focus_hf.fit.costs`). From that follow,
at every share of pairs, the best choices of four kinds:

    python -m studies.frontier my-adapter/fit another/fit --output frontier.png

Args are folders of fitted layers (``fit`` inside an adapter's folder), of one number of groups each. The estimate is
the KL divergence from dense predictions to second order, head by head: near what is measured while it is small.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from focus_hf.fit.assemble import Table, cost_table
from focus_hf.fit.budget import choose, choose_alike, mean_pairs, total_loss
from focus_hf.fit.costs import Cost, Option
from safetensors import safe_open

from focus_hf.fit.layer import LayerFit

#: By the name of a kind of choice: share of pairs and estimated loss in nats per token.
Curves = dict[str, list[tuple[float, float]]]

SHARES = np.geomspace(0.04, 0.9, 40)


def read_fit(folder: Path) -> tuple[int, dict[int, Table]]:
    """The number of groups, and the costs by length, of a folder of fitted layers."""
    fitted, groups = {}, 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            costs = json.loads(file.metadata()["costs"])
            if "centroids" in file.keys():  # noqa: SIM118
                groups = file.get_slice("centroids").get_shape()[1]
        fitted[int(path.stem)] = LayerFit(
            None,
            {
                int(length): [{Option(w, k): Cost(loss, pairs) for w, k, loss, pairs in head} for head in heads]
                for length, heads in costs.items()
            },
        )
    if not fitted:
        raise SystemExit(f"{folder} holds no fitted layers: name the folder 'fit' inside an adapter's.")
    lengths = next(iter(fitted.values())).costs
    return groups, {length: cost_table(fitted, length) for length in sorted(lengths)}


def without_groups(table: Table) -> Table:
    """Windows and everything only."""
    return {head: {o: cost for o, cost in options.items() if not o.top_k} for head, options in table.items()}


def curve(table: Table, choice: Callable[[Table, float], dict[str, Option]]) -> list[tuple[float, float]]:
    """Share of pairs and estimated loss in nats per token, at every share that can be had."""
    points = []
    for share in SHARES:
        try:
            chosen = choice(table, float(share))
        except ValueError:
            continue
        points.append((mean_pairs(table, chosen), total_loss(table, chosen)))
    return sorted(set(points))


def curves(groups: int, table: Table, plain: bool) -> Curves:
    """The best of each kind; those without groups only where they are asked for."""
    found = {
        f"K={groups}, budgets per head": curve(table, choose),
        f"K={groups}, all heads alike": curve(table, choose_alike),
    }
    if plain:
        found |= {
            "windows, budgets per head": curve(without_groups(table), choose),
            "one window for all heads": curve(without_groups(table), choose_alike),
        }
    return found


def draw(fits: Iterable[tuple[int, dict[int, Table]]], output: Path) -> dict[int, Curves]:
    """Write the picture, a panel for each length."""
    from matplotlib import pyplot

    fits = list(fits)
    lengths = sorted({length for _, tables in fits for length in tables})
    figure, panels = pyplot.subplots(1, len(lengths), figsize=(4.6 * len(lengths), 4.2), sharey=True, squeeze=False)
    drawn: dict[int, Curves] = {}
    for panel, length in zip(panels[0], lengths, strict=True):
        here = [(groups, tables[length]) for groups, tables in fits if length in tables]
        drawn[length] = {}
        for number, (groups, table) in enumerate(here):
            drawn[length] |= curves(groups, table, plain=number == 0)
        for name, points in drawn[length].items():
            panel.plot(*zip(*points, strict=True), "--" if "window" in name else "-", label=name)
        panel.set(xscale="log", yscale="log", title=f"{length:,} tokens", xlabel="share of pairs")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("estimated loss, nats per token")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("frontier.png"))
    args = parser.parse_args()
    for length, found in draw(map(read_fit, args.folders), args.output).items():
        for share in (0.1, 0.15, 0.25, 0.4):
            row = {name: loss_at(points, share) for name, points in found.items()}
            print(f"{length:>6} tokens, {share:.0%}:", ", ".join(f"{k} {v:.4f}" for k, v in row.items()))


def loss_at(points: list[tuple[float, float]], share: float) -> float:
    """Loss of the last point within a share."""
    return min((loss for pairs, loss in points if pairs <= share + 1e-9), default=float("nan"))


if __name__ == "__main__":
    main()
