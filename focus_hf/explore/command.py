"""`focus-hf explore`: an adapter and a text in; a page, and a Space if asked for, out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..adapter import set_routing
from ..adapter.placement import check_placement
from ..hub import load_adapted
from ..records.adapter_files import GROUPS_FILE
from ..records.group_report import GroupReport
from ..texts import TextSource
from .data import ExplorerData, perplexity
from .page import Page, render, write
from .read import explore
from .space import is_hub_id, write_space


def run_explore(
    adapter: str,
    texts: Sequence[str],
    *,
    progress: Progress,
    pairs: float | None = None,
    top_k: int | None = None,
    base: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "auto",
    max_tokens: int = 1500,
    window: int | None = None,
    out: Path = Path("explorer.html"),
    space: Path | None = None,
) -> dict[str, Any]:
    """Make the page of an adapter and write it.

    Args:
        adapter: folder or Hub id.
        texts: text files.
        progress: shows how far it is.
        pairs, top_k: the dial, see `focus_hf.set_routing`; the adapter's own setting by default.
        base: base model, if not the one that the adapter names.
        revision: of the adapter on the Hub.
        device, device_map, dtype: where to run, see `load_adapted`.
        max_tokens, window: see `explore`.
        out: the page.
        space: folder that becomes a static Space.

    Returns:
        Facts about what was written.

    Raises:
        ValueError: no text, a setting that this adapter does not have, or bad input.
    """
    if not texts:
        raise ValueError("Which text should be shown? Give --text.")
    check_placement(device, device_map, dtype)
    loaded = TextSource(tuple(texts)).load()
    model, tokenizer, folder = load_adapted(
        adapter, base=base, revision=revision, device=device, device_map=device_map, dtype=dtype
    )
    if pairs is not None or top_k is not None:
        set_routing(model, pairs=pairs, top_k=top_k)
    bar = progress.add_task("reading the text", total=None)
    data = explore(
        model,
        tokenizer,
        loaded.documents,
        adapter=adapter if is_hub_id(adapter) else Path(adapter).resolve().name,  # folders stay on this machine
        name=loaded.name,
        max_tokens=max_tokens,
        window=window,
        tick=lambda tokens: progress.advance(bar, tokens),
    )
    data.names = reported_names(folder)
    progress.update(bar, description="writing the page", total=2 * len(data.tokens))
    page = render(data)
    size = write(page, out)
    if space is not None:
        write_space(page, space, [adapter, base or str(model.config._name_or_path)], loaded.name)
    progress.stop()
    return _facts(data, page, size, out, space)


def reported_names(folder: Path) -> dict[str, list[str]]:
    """What the adapter's own report calls the groups of each head, so that page and card agree; empty without one."""
    if not (folder / GROUPS_FILE).is_file():
        return {}
    report = GroupReport.from_json(folder / GROUPS_FILE)
    plain = {layer.name.removeprefix("base_model.model."): layer for layer in report.layers}
    return {name: [group.name for group in layer.groups] for name, layer in plain.items()}


def _facts(data: ExplorerData, page: Page, size: int, out: Path, space: Path | None) -> dict[str, Any]:
    first = max(range(len(data.heads)), key=lambda number: page.packed.words[number].interest)
    return {
        "page": str(out),
        "bytes": size,
        "space": None if space is None else str(space),
        "text": data.text,
        "tokens": len(data.tokens),
        "left_out": data.left_out,
        "windows": len(data.starts),
        "heads": len(data.heads),
        "heads_with_tokens": page.packed.heads,
        "first": f"{data.heads[first].title}: {page.packed.words[first].sentence}",
        "setting": data.setting,
        "pairs": round(data.pairs, 4),
        "perplexity": _rounded(perplexity(data.losses)),
        "dense_perplexity": _rounded(perplexity(data.dense_losses)),
    }


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)
