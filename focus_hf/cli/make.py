"""Commands that make an adapter: train, fit; and the one that shows all: demo."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..fit.recipe import FitRecipe
from ..output import say, screen
from ..train.recipe import TrainRecipe
from .app import app, is_main_process, progress_bars
from .flags import AsJson, Config, flags_of


@app.command(epilog="Example: focus-hf demo --base ./my-model --text notes.txt --out demo-output")
def demo(
    base: Annotated[str | None, typer.Option(help="Causal language model: a folder or a Hub id.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to train on.", exists=True, dir_okay=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything it writes.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(help="Training steps of the centroids.", min=1)] = 120,
    treebank: Annotated[
        Path | None, typer.Option(help="Treebank to measure groups against (.conllu).", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Train, explain, push to a Hub on this machine, load back and generate: the whole story, offline."""
    from ..demo import run_demo

    run_demo(base, text, out, steps, treebank)


@app.command(epilog="Example: focus-hf train --model org/base --train-file notes.txt --output-dir my-adapter")
@flags_of(TrainRecipe)
def train(given: dict[str, Any], config: Config = None, as_json: AsJson = False) -> None:
    """Train an adapter on text, balance its groups, measure it, and fill its card.

    On several devices: accelerate launch -m focus_hf.cli train ...
    """
    from ..card import write_card
    from ..evaluate.report import tables
    from ..train import RichProgress, last_checkpoint
    from ..train import train as train_adapter

    recipe = TrainRecipe.from_values(config, given)
    try:
        with progress_bars() as progress:
            result = train_adapter(
                recipe,
                [RichProgress(progress, "centroids")],
                say=lambda text: progress.console.print(text, style="dim"),
                on_saved=partial(write_card, base_model=recipe.base_model),
            )
    except KeyboardInterrupt as interrupt:
        checkpoint = last_checkpoint(Path(recipe.output_dir) / "trainer")
        saved = checkpoint and f"--resume goes on from {checkpoint.name}"
        left = str(interrupt) or saved or "no checkpoint was written (--save-steps)"
        typer.echo(f"Interrupted: {left}.", err=True)
        raise typer.Exit(130) from None
    if not is_main_process():
        return
    if as_json:
        typer.echo(json.dumps({"folder": str(result.folder), "results": asdict(result.results)}))
        return
    out = screen()
    for table in tables(result.results):
        out.print(table)
    largest = 100 * (result.results.largest_group or 0.0)
    out.print(f"Largest group of any layer: {largest:.1f} % (ideal {100 / recipe.num_groups:.1f} %)")
    say(out, f"The adapter is in {result.folder}")


@app.command(
    epilog="Example: focus-hf fit --model org/base --train-file novel.txt --train-file code.txt "
    "--train-file letters.txt --output-dir my-adapter"
)
@flags_of(FitRecipe)
def fit(given: dict[str, Any], config: Config = None, as_json: AsJson = False) -> None:
    """Fit an adapter to a model's own attention, without training: each head's groups of keys, and who reads them.

    Lengths and numbers of windows go together: --seq-len 2048 --windows 24 --seq-len 16384 --windows 6. The dial is
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
        typer.echo(json.dumps(found))
        return
    out = screen()
    table = Table("tokens", "pairs", "loss (estimate)", "a window with as many pairs", "threshold")
    for length, points in sorted(result.dial.items()):
        for point in points:
            losses = per_cent(point.loss), per_cent(point.window_loss)
            table.add_row(f"{length:,}", f"{point.pairs:.0%}", *losses, f"{point.threshold:.2f}")
    out.print(table)
    folder, shortest = shlex.quote(str(result.folder)), min(result.results.training["recipe"]["seq_len"])
    for text in (
        *afterwards(result.dial, recipe.pairs, result.layers),
        f"The adapter is in {result.folder}; focus_hf.set_routing(model, pairs=0.15) turns the dial.",
        f"To measure it: focus-hf eval --adapter {folder} --text FILE --seq-len {shortest} --write",
    ):
        say(out, text)
