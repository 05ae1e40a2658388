"""Commands that measure: eval, compare, verify, bench."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..output import deliver, screen
from .app import app, numbers, progress_bars, shares
from .flags import Adapter, AsJson, Device, DeviceMap, JsonFile, Placement, flags_of, placed


@app.command(
    "eval",
    epilog="Example: focus-hf eval --adapter my-adapter --text held-out.txt --seq-len 512,1024 --top-k 1,2 --json",
)
@flags_of(Placement)
def evaluate_command(
    given: dict[str, Any],
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
            "slash, streaming, clusters, clusters-estimate, oracle; the last three and quest, with -gqa, choose once "
            "for all query heads of a key head."
        ),
    ] = "dense,local,hard,window",
    top_k: Annotated[str | None, typer.Option(help="Groups per token in hard mode, with commas.")] = None,
    pairs: Annotated[
        str | None,
        typer.Option(help="Budgets of the adapter, by their shares of pairs, with commas.", show_default="as saved"),
    ] = None,
    stride: Annotated[float, typer.Option(help="Step of the sliding window, as a share of the length.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text, 0 for all.", min=0)] = 0,
    retrieval: Annotated[str | None, typer.Option(help="Lengths of the retrieval probe, with commas.")] = None,
    trials: Annotated[int, typer.Option(help="Prompts of the probe at each length.", min=1)] = 16,
    ruler: Annotated[str | None, typer.Option(help="Lengths of RULER's tasks, with commas; needs no text.")] = None,
    ruler_tasks: Annotated[
        str | None, typer.Option(help="Which of RULER's tasks, with commas.", show_default="all")
    ] = None,
    ruler_samples: Annotated[int, typer.Option(help="Prompts of each task and length.", min=1)] = 10,
    ruler_question: Annotated[
        int,
        typer.Option(help="Last tokens of a prompt that read, as its answer does, another share.", min=0),
    ] = 0,
    ruler_question_pairs: Annotated[float, typer.Option(help="The share of what is before them; 1 is all.")] = 1.0,
    code: Annotated[
        str | None, typer.Option(help="Lengths of tasks on code where far tokens decide, with commas; needs no text.")
    ] = None,
    code_samples: Annotated[int, typer.Option(help="Prompts of each task on code and length.", min=1)] = 10,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas.")] = None,
    task_path: Annotated[Path | None, typer.Option(help="Folder of task files of your own.", exists=True)] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task, at most.", min=1)] = None,
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
    from ..evaluate import CodePlan, EvaluationPlan, RulerPlan
    from ..evaluate.command import run_evaluation
    from ..hub import load_adapted
    from ..texts import TextSource

    plan = EvaluationPlan(
        numbers("--seq-len", seq_len),
        modes.split(","),
        numbers("--top-k", top_k or None),
        pairs.split(",") if pairs else [],
        stride,
        max_tokens,
        numbers("--retrieval", retrieval or None),
        trials,
        batch_size,
        seed,
        count_scoring,
    )
    asked = None
    if ruler:
        chosen = {"tasks": ruler_tasks.split(",")} if ruler_tasks else {}
        asked = RulerPlan(
            numbers("--ruler", ruler),
            **chosen,
            samples=ruler_samples,
            seed=seed,
            question_tokens=ruler_question,
            question_pairs=ruler_question_pairs,
        )
    placement = placed(given)
    domain = [TextSource(tuple(map(str, text or ())), dataset, subset, split, None, column)] if text or dataset else []
    others = [TextSource((str(name),), column=column) for name in retention or ()]
    with progress_bars() as progress:
        run_evaluation(
            adapter,
            [*domain, *others],
            plan,
            load=partial(load_adapted, **placement),
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

    compared = compare_adapters([adapter_folder(name) for name in adapter])
    document = json.dumps({"rows": [row.to_dict() for row in compared]}, indent=2) + "\n"
    deliver(document, json_out, [adapters_table(adapter, compared)])


_STYLES = {"holds": "green", "differs": "bold red", "not checked": "yellow"}


@app.command(epilog="Example: focus-hf verify org/llama-focus --text held-out.txt")
@flags_of(Placement)
def verify(
    given: dict[str, Any],
    adapter: Annotated[str, typer.Argument(help="The adapter: a folder or a Hub id.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file that the card names; may be repeated.", exists=True)
    ] = None,
    treebank: Annotated[
        list[Path] | None, typer.Option(help="Treebank of the card's group report (.conllu).", exists=True)
    ] = None,
    files_only: Annotated[bool, typer.Option("--files-only", help="Check what needs no model.")] = False,
    seq_len: Annotated[
        str | None, typer.Option(help="Measure perplexity at these lengths only, with commas; long ones take long.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a card's claims again on this machine; exit code 1 if one does not hold."""
    from ..card.read import CARD
    from ..hub import adapter_folder
    from ..machine import require
    from ..verify import verify as verify_adapter
    from ..verify.claims import all_hold, verdict_of

    placement = placed(given)
    lengths = numbers("--seq-len", seq_len) or None
    if treebank:
        require("conllu", "sklearn")
    folder = adapter_folder(adapter, revision=placement.pop("revision", None))
    with progress_bars() as progress:
        bar = progress.add_task("verifying", total=None, visible=False)
        claims = verify_adapter(
            str(folder),
            texts=[str(path) for path in text or ()],
            treebanks=[str(path) for path in treebank or ()],
            files_only=files_only,
            lengths=lengths,
            tick=lambda done: progress.update(bar, advance=1, description=done, visible=True),
            **placement,
        )
    if as_json:
        found = {"adapter": adapter, "holds": all_hold(claims), "claims": [asdict(claim) for claim in claims]}
        typer.echo(json.dumps(found))
    else:
        table = Table(box=None)
        for column in ("claim", "claimed", "measured", "verdict", ""):
            table.add_column(column, overflow="fold")
        for claim in claims:
            verdict = Text(claim.verdict, style=_STYLES[claim.verdict])
            table.add_row(Text(claim.what), Text(claim.claimed), Text(claim.measured or ""), verdict, Text(claim.note))
        screen().print(table)
        typer.echo(verdict_of(claims, has_card=(folder / CARD).is_file()))
    raise typer.Exit(0 if all_hold(claims) else 1)


@app.command(
    epilog="Example: focus-hf bench --what attention,decode --lengths 2048,8192 --top-k 1,2 --json results.json"
)
def bench(
    what: Annotated[str | None, typer.Option(help="Of attention, decode, model, memory, serving.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter for `model`, `serving`: a folder or a Hub id.")] = None,
    device: Device = "cpu",
    device_map: DeviceMap = None,
    lengths: Annotated[str, typer.Option(help="Tokens, several with commas.")] = "1024,2048,4096,8192",
    num_groups: Annotated[str, typer.Option(help="Groups per layer (K), several with commas.")] = "8",
    top_k: Annotated[str, typer.Option(help="Groups per token (k), several with commas.")] = "1",
    local_window: Annotated[str, typer.Option(help="Local window (w), several with commas.")] = "128",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; several with commas.")] = "float32",
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.", min=1)] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch on CPU.", min=1)] = None,
    kernel: Annotated[str, typer.Option(help="Attention backend, as `focus-hf info` lists them.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Model for `model`, `serving`: a folder or a Hub id.")] = None,
    engine: Annotated[str, typer.Option(help="What serves: transformers, or vllm beside itself.")] = "transformers",
    text: Annotated[Path | None, typer.Option(help="Prompts of `model`, of vLLM; random tokens without.")] = None,
    pairs: Annotated[str | None, typer.Option(help="The dial of --adapter: a share for each length, or one.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each setting, at least.", min=0.1)] = 5.0,
    json_out: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw ratios against lengths (PNG).")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the figures into the adapter's folder.")] = False,
) -> None:
    """Measure speed and memory against the best dense attention, in one interleaved run."""
    from ..bench import grid
    from ..bench.run import ENGINES, KINDS, run_bench
    from ..placement import check_placement

    what = what or ("attention,decode" if adapter is None else "model")
    kinds = [kind for kind in what.split(",") if kind]
    if adapter is not None and not {"model", "serving"}.issuperset(kinds):
        raise ValueError("--adapter is measured in a whole model: --what model, or serving")
    if engine not in ENGINES or (engine != "transformers" and kinds != ["serving"]):
        raise ValueError(f"--engine is one of {', '.join(ENGINES)}, for --what serving; got {engine!r}.")
    if engine == "vllm" and (adapter is None or device_map is not None):
        raise ValueError("--engine vllm serves an adapter, where it likes: give --adapter, and no --device-map.")
    if pairs is not None and adapter is None:
        raise ValueError("--pairs is the dial of an adapter: give --adapter.")
    if text is not None and (adapter is None or kinds != ["serving" if engine == "vllm" else "model"]):
        raise ValueError("--text is for an adapter: --what model, or --what serving --engine vllm.")
    if device_map is not None:
        if base is None and adapter is None:
            raise ValueError("--device-map spreads a model: give --base or --adapter.")
        check_placement(device, device_map)
    if write and adapter is None:
        raise ValueError("--write puts the figures into an adapter's folder: give --adapter.")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--what must be of {', '.join(KINDS)}, got {unknown[0]!r}.")
    fixed = {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim, "device": device, "kernel": kernel}
    settings = list(
        grid(
            numbers("--lengths", lengths),
            numbers("--num-groups", num_groups),
            numbers("--top-k", top_k or "1"),
            numbers("--local-window", local_window),
            dtype.split(","),
            **fixed,
        )
    )
    run_bench(
        kinds,
        settings,
        base=base,
        adapter=adapter,
        device_map=device_map,
        engine=engine,
        text=text,
        pairs=shares("--pairs", pairs or None),
        write=write,
        threads=threads,
        seconds=seconds,
        json_out=json_out,
        markdown=markdown,
        plot=plot,
    )
