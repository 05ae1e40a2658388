"""`focus-hf explore`: an adapter and a text in; a page, and a Space if asked for, out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..adapter import set_routing
from ..evaluate.run import Load
from ..records import GroupReport
from ..texts import TextSource
from .page import is_hub_id, render, write, write_space
from .read import explore


def run_explore(
    adapter: str,
    texts: Sequence[str],
    *,
    load: Load,
    progress: Progress,
    pairs: float | None = None,
    top_k: int | None = None,
    max_tokens: int = 1500,
    window: int | None = None,
    out: Path = Path("explorer.html"),
    space: Path | None = None,
) -> dict[str, Any]:
    """Make the page of an adapter and write it.

    Args:
        adapter: folder or Hub id.
        texts: text files.
        load: gives model, tokenizer and folder of the adapter, see `focus_hf.hub.load_adapted`.
        progress: shows how far it is.
        pairs, top_k: the dial, see `focus_hf.set_routing`; the adapter's own setting by default.
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
    loaded = TextSource(tuple(texts)).load()
    model, tokenizer, folder = load(adapter)
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
        write_space(page, space, [adapter, str(model.config._name_or_path)], loaded.name)
    progress.stop()
    head, words = max(zip(data.heads, page.packed.words, strict=True), key=lambda pair: pair[1].interest)
    dense, focus = data.perplexities
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
        "first": f"{head.title}: {words.sentence}",
        "setting": data.setting,
        "pairs": round(data.pairs, 4),
        "perplexity": focus,
        "dense_perplexity": dense,
    }


def reported_names(folder: Path) -> dict[str, list[str]]:
    """What the adapter's own report calls the groups of each head, so that page and card agree; empty without one."""
    report = GroupReport.load(folder)
    return {
        layer.name.removeprefix("base_model.model."): [group.name for group in layer.groups]
        for layer in (report.layers if report else ())
    }
