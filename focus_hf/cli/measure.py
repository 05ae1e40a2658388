"""Commands that show and measure speed: demo, bench, info."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import app, numbers, show


@app.command(epilog="Example: focus-hf demo --base ./my-model --text notes.txt --out demo-output")
def demo(
    base: Annotated[str | None, typer.Option(help="Causal language model: a folder or a Hub id.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to train on.", exists=True, dir_okay=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything it writes.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(help="Training steps of the centroids.", min=1)] = 120,
) -> None:
    """Train, push to a Hub on this machine, load back and generate: the whole story, offline."""
    from ..demo import run_demo

    run_demo(base, text, out, steps)


@app.command(
    epilog="Example: focus-hf bench --what attention,decode --lengths 2048,8192 --top-k 1,2 --json results.json"
)
def bench(
    what: Annotated[str, typer.Option(help="Of attention, decode, model, memory, training.")] = "attention,decode",
    device: Annotated[str, typer.Option(help="Where: cpu, cuda, cuda:1 ...")] = "cpu",
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
    base: Annotated[str | None, typer.Option(help="Model for `model`: a folder or a Hub id.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each setting, at least.", min=0.1)] = 5.0,
    json_out: Annotated[str | None, typer.Option("--json", help="Write JSON: a file, or - for the screen.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw ratios against lengths (PNG).")] = None,
) -> None:
    """Measure speed and memory against the best dense attention, in one interleaved run."""
    from ..bench import grid
    from ..bench.run import KINDS, run_bench

    kinds = [kind for kind in what.split(",") if kind]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--what must be of {', '.join(KINDS)}, got {unknown[0]!r}.")
    fixed = {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim, "device": device, "kernel": kernel}
    settings = list(
        grid(
            numbers("--lengths", lengths),
            numbers("--num-groups", num_groups),
            numbers("--top-k", top_k),
            numbers("--local-window", local_window),
            dtype.split(","),
            **fixed,
        )
    )
    run_bench(
        kinds,
        settings,
        base=base,
        threads=threads,
        seconds=seconds,
        json_out=json_out,
        markdown=markdown,
        plot=plot,
    )


@app.command(epilog="Example: focus-hf info")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Versions, devices, and the attention kernels found on this machine, with the one in use."""
    from ..machine import environment

    facts = environment()
    lines = [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"{d['device']}: {d['name']}, uses {d['kernel']}" for d in facts["devices"]]
    lines += [f"kernel {name}: {state}" for name, state in facts["kernels"].items()]
    show(facts, "\n".join([f"Python {facts['python']}, {facts['platform']}", *lines]), as_json)
