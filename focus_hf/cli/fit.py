"""The command that fits an adapter."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ..fit.recipe import FitRecipe
from ..output import screen
from .app import app, progress_bars, show
from .options import CONFIG, JSON, flags_of


@app.command(
    epilog="Example: focus-hf fit --model org/base --train-file novel.txt --train-file code.txt --pairs 0.25 "
    "--output-dir my-adapter"
)
@flags_of(FitRecipe, more=[CONFIG, JSON])
def fit(given: dict[str, Any], config: Path | None, as_json: bool) -> None:
    """Fit an adapter to a model's own attention, without training: groups for each head, and pairs where they count.

    Several budgets in one adapter: --pairs 0.25 --at 2048 --pairs 0.15 --at 4096; set_routing(model, pairs=0.15)
    chooses one.
    """
    fit_adapter(fit_recipe(config, given), as_json)


def fit_recipe(config: Path | None, given: dict[str, Any]) -> FitRecipe:
    """The recipe of a YAML file and of flags.

    Raises:
        ValueError: a value is out of range, or training's and not fitting's.
    """
    return FitRecipe.from_values(config, given)


def fit_adapter(recipe: FitRecipe, as_json: bool) -> None:
    """Fit, and say what heads got."""
    from ..card import write_card
    from ..fit import fit as fit_to

    try:
        with progress_bars() as progress:
            result = fit_to(
                recipe,
                progress,
                say=lambda text: progress.console.print(text, style="dim"),
                on_saved=partial(write_card, base_model=recipe.base_model),
            )
    except KeyboardInterrupt:
        typer.echo("Interrupted: --resume goes on with the layers that are fitted.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        budgets = [asdict(budget) for budget in result.budgets]
        show({"folder": str(result.folder), "budgets": budgets, "results": asdict(result.results)}, "", True)
        return
    out = screen()
    table = Table(
        "pairs wanted", "at length", "pairs", "heads with groups", "windows only", "everything", "added loss"
    )
    for budget in result.budgets:
        kinds = [str(budget.heads.get(kind, 0)) for kind in ("groups", "window", "everything")]
        table.add_row(
            f"{budget.wanted:.1%}", f"{budget.length:,}", f"{budget.pairs:.1%}", *kinds, f"{budget.loss:.4f} nats"
        )
    out.print(table)
    folder = shlex.quote(str(result.folder))
    out.print(f"The adapter is in {result.folder}", markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"To measure it: focus-hf eval --adapter {folder} --text FILE --seq-len {recipe.at[0]} --write",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
