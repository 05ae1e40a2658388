"""Commands about quality: train, eval, compare."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..output import screen
from ..train.recipe import TrainRecipe
from .app import app, is_main_process, numbers, progress_bars, show
from .flags import Adapter, BaseModel, Device, DeviceMap, Dtype, JsonFile, Revision
from .options import CONFIG, JSON, flags_of, named_values


@app.command(epilog="Example: focus-hf train --model org/base --train-file notes.txt --output-dir my-adapter")
@flags_of(TrainRecipe, more=[CONFIG, JSON])
def train(given: dict[str, Any], config: Path | None, as_json: bool) -> None:
    """Train an adapter on text, balance its groups, measure it, and fill its card.

    On several devices: accelerate launch -m focus_hf.cli train ...
    """
    from dataclasses import asdict

    from ..card import write_card
    from ..evaluate.report import tables
    from ..train import RichProgress, last_checkpoint
    from ..train import train as train_adapter

    if "trainer" in given:
        given["trainer"] = named_values("--trainer", given["trainer"])
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
        left = (
            "no checkpoint was written (--save-steps)"
            if checkpoint is None
            else f"--resume goes on from {checkpoint.name}"
        )
        typer.echo(f"Interrupted: {str(interrupt) or left}.", err=True)
        raise typer.Exit(130) from None
    if is_main_process():
        if as_json:
            show({"folder": str(result.folder), "results": asdict(result.results)}, "", True)
            return
        out = screen()
        for table in tables(result.results):
            out.print(table)
        largest = 100 * (result.results.largest_group or 0.0)
        out.print(f"Largest group of any layer: {largest:.1f} % (ideal {100 / recipe.num_groups:.1f} %)")
        out.print(f"The adapter is in {result.folder}", markup=False, highlight=False, soft_wrap=True)


@app.command(
    "eval",
    epilog="Example: focus-hf eval --adapter my-adapter --text held-out.txt --seq-len 512,1024 --top-k 1,2 --json",
)
def evaluate_command(
    adapter: Adapter,
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text of the domain.", exists=True)] = None,
    retention: Annotated[
        list[Path] | None, typer.Option(help="Text of another domain: is anything lost there?", exists=True)
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A data set instead of a text file.")] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "test",
    column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    seq_len: Annotated[str, typer.Option(help="Context lengths in tokens, with commas.")] = "1024",
    modes: Annotated[
        str,
        typer.Option(
            help="Of dense, local, soft, hard, and what reads as many pairs as hard: window, random, quest, blocks, "
            "slash, clusters, clusters-estimate, streaming, oracle."
        ),
    ] = "dense,local,hard,window",
    top_k: Annotated[str | None, typer.Option(help="Groups per token in hard mode, with commas.")] = None,
    pairs: Annotated[
        str | None,
        typer.Option(help="Budgets of the adapter, by their shares of pairs, with commas [default: as saved]."),
    ] = None,
    stride: Annotated[float, typer.Option(help="Step of the sliding window, as a share of the length.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text, 0 for all.", min=0)] = 0,
    retrieval: Annotated[str | None, typer.Option(help="Lengths of the retrieval probe, with commas.")] = None,
    trials: Annotated[int, typer.Option(help="Prompts of the probe at each length.", min=1)] = 16,
    ruler: Annotated[str | None, typer.Option(help="Lengths of RULER's tasks, with commas; needs no text.")] = None,
    ruler_tasks: Annotated[
        str | None, typer.Option(help="Which of RULER's tasks, with commas [default: all].")
    ] = None,
    ruler_samples: Annotated[int, typer.Option(help="Prompts of each task and length.", min=1)] = 10,
    code: Annotated[
        str | None, typer.Option(help="Lengths of tasks on code where far tokens decide, with commas; needs no text.")
    ] = None,
    code_samples: Annotated[int, typer.Option(help="Prompts of each task on code and length.", min=1)] = 10,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas.")] = None,
    task_path: Annotated[Path | None, typer.Option(help="Folder of task files of your own.", exists=True)] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task, at most.", min=1)] = None,
    model: BaseModel = None,
    revision: Revision = None,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    batch_size: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 4,
    count_scoring: Annotated[
        bool, typer.Option("--count-scoring", help="What is computed to choose counts as pairs.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts of the probe, RULER and code.")] = 0,
    json_out: JsonFile = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the figures into the adapter's own files.")] = False,
) -> None:
    """Measure an adapter: perplexity in every mode, retention, retrieval, RULER, code, benchmarks; dense beside it."""
    from ..adapter.placement import check_placement
    from ..evaluate import CodePlan, EvaluationPlan, RulerPlan
    from ..evaluate.command import run_evaluation
    from ..hub import load_adapted
    from ..texts import TextSource

    plan = EvaluationPlan(
        numbers("--seq-len", seq_len),
        modes.split(","),
        numbers("--top-k", top_k) if top_k else [],
        pairs.split(",") if pairs else [],
        stride,
        max_tokens,
        numbers("--retrieval", retrieval) if retrieval else [],
        trials,
        batch_size,
        seed,
        count_scoring,
    )
    asked = None
    if ruler:
        chosen = {"tasks": ruler_tasks.split(",")} if ruler_tasks else {}
        asked = RulerPlan(numbers("--ruler", ruler), **chosen, samples=ruler_samples, seed=seed)
    check_placement(device, device_map, dtype)
    domain = [TextSource(tuple(map(str, text or ())), dataset, subset, split, None, column)] if text or dataset else []
    others = [TextSource((str(name),), column=column) for name in retention or ()]
    with progress_bars() as progress:
        run_evaluation(
            adapter,
            [*domain, *others],
            plan,
            load=partial(
                load_adapted, base=model, device=device, device_map=device_map, dtype=dtype, revision=revision
            ),
            ruler=asked,
            code=CodePlan(numbers("--code", code), code_samples, seed) if code else None,
            tasks=[name for name in (tasks or "").split(",") if name],
            task_path=task_path,
            limit=limit,
            json_out=json_out,
            plots=plots,
            write=write,
            progress=progress,
        )


@app.command(epilog="Example: focus-hf compare --adapter my-adapter --adapter org/other-focus")
def compare(
    adapter: Annotated[list[str], typer.Option(help="Of two adapters, given one by one: a folder or a Hub id.")],
    json_out: JsonFile = None,
) -> None:
    """Compare two adapters of one base model by what was measured; nothing is run."""
    from ..compare import adapters_table, compare_adapters
    from ..hub import adapter_folder
    from ..output import deliver

    compared = compare_adapters([adapter_folder(name) for name in adapter])
    document = json.dumps({"rows": [row.to_dict() for row in compared]}, indent=2) + "\n"
    deliver(document, json_out, [adapters_table(adapter, compared)])
