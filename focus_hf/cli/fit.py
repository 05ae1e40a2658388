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
    epilog="Example: focus-hf fit --model org/base --train-file novel.txt --train-file code.txt "
    "--train-file letters.txt --output-dir my-adapter"
)
@flags_of(FitRecipe, more=[CONFIG, JSON])
def fit(given: dict[str, Any], config: Path | None, as_json: bool) -> None:
    """Fit an adapter to a model's own attention, without training: each head's groups of keys, and who reads them.

    Lengths and numbers of windows go together: --seq-len 2048 --windows 24 --seq-len 8192 --windows 6. The dial is
    turned afterwards: set_routing(model, pairs=0.15).
    """
    from ..card import write_card
    from ..fit import fit as fit_to
    from ..fit.dial import afterwards, per_cent

    recipe = FitRecipe.from_values(config, given)
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
        dial = {str(length): [asdict(point) for point in points] for length, points in result.dial.items()}
        layers = {"routed": result.layers[0], "all": result.layers[1]}
        found = {"folder": str(result.folder), "dial": dial, "layers": layers, "results": asdict(result.results)}
        show(found, "", True)
        return
    out = screen()
    table = Table("tokens", "pairs", "loss (estimate)", "a window with as many pairs", "threshold")
    for length, points in sorted(result.dial.items()):
        for point in points:
            losses = per_cent(point.loss), per_cent(point.window_loss)
            table.add_row(f"{length:,}", f"{point.pairs:.0%}", *losses, f"{point.threshold:.2f}")
    out.print(table)
    folder = shlex.quote(str(result.folder))
    for text in (
        *afterwards(result.dial, recipe.pairs, result.layers),
        f"The adapter is in {result.folder}; focus_hf.set_routing(model, pairs=0.15) turns the dial.",
        f"To measure it: focus-hf eval --adapter {folder} --text FILE --seq-len {min(recipe.seq_len)} --write",
    ):
        out.print(text, markup=False, highlight=False, soft_wrap=True)
