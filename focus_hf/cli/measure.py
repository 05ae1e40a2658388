"""Commands that show and measure speed: demo, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import app, numbers, shares
from .flags import Device, DeviceMap, JsonFile


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
    top_k: Annotated[str | None, typer.Option(help="Groups per token (k), several with commas.")] = None,
    local_window: Annotated[str, typer.Option(help="Local window (w), several with commas.")] = "128",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; several with commas.")] = "float32",
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.", min=1)] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch on CPU.", min=1)] = None,
    kernel: Annotated[str, typer.Option(help="Attention backend, as `focus-hf info` lists them.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Model for `model`, `serving`: a folder or a Hub id.")] = None,
    text: Annotated[Path | None, typer.Option(help="The prompt of `model`; random tokens without.")] = None,
    pairs: Annotated[str | None, typer.Option(help="The dial of --adapter: a share for each length, or one.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each setting, at least.", min=0.1)] = 5.0,
    json_out: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw ratios against lengths (PNG).")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the figures into the adapter's folder.")] = False,
) -> None:
    """Measure speed and memory against the best dense attention, in one interleaved run."""
    from ..adapter.placement import check_placement
    from ..bench import grid
    from ..bench.run import KINDS, adapter_settings, run_bench

    what = what or ("attention,decode" if adapter is None else "model")
    kinds = [kind for kind in what.split(",") if kind]
    if adapter is not None and not {"model", "serving"}.issuperset(kinds):
        raise ValueError("--adapter is measured in a whole model: --what model, or serving")
    if (text, pairs) != (None, None) and (adapter is None or kinds != ["model"]):
        raise ValueError("--text and --pairs are for an adapter in a whole model: --what model --adapter ...")
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
    if adapter is not None:
        settings = adapter_settings(adapter, settings)
    run_bench(
        kinds,
        settings,
        base=base,
        adapter=adapter,
        device_map=device_map,
        text=text,
        pairs=shares("--pairs", pairs) if pairs else (),
        write=write,
        threads=threads,
        seconds=seconds,
        json_out=json_out,
        markdown=markdown,
        plot=plot,
    )
