"""`focus-hf explore`: adapters and a text in; a page, and a Space if asked for, out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..adapter.placement import check_placement
from ..hub import load_adapted
from ..interpret import GroupReport
from ..machine import require
from ..records.adapter_files import GROUPS_FILE
from ..texts import TextSource
from .data import ExplorerData, perplexity
from .page import Page, render, write
from .run import Subject, explore, passes
from .space import is_hub_id, write_space


def run_explore(
    adapter: str,
    texts: Sequence[str],
    *,
    progress: Progress,
    against: str | None = None,
    top_ks: Sequence[int] = (),
    base: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "auto",
    max_tokens: int = 5000,
    window: int | None = None,
    out: Path = Path("explorer.html"),
    space: Path | None = None,
) -> dict[str, Any]:
    """Make the page of an adapter, or of two sides, and write it.

    Args:
        adapter: folder or Hub id.
        texts: text files.
        progress: shows how far it is.
        against: another adapter of the same base model, for the other side.
        top_ks: groups per token; two make two sides of one adapter.
        base: base model, if not the one that an adapter names.
        revision: of the adapter on the Hub.
        device, device_map, dtype: where to run, see `load_adapted`.
        max_tokens, window: see `explore`.
        out: the page.
        space: folder that becomes a static Space.

    Returns:
        Facts about what was written.

    Raises:
        ValueError: no text, more than two sides, adapters that do not go together, or bad input.
    """
    if not texts:
        raise ValueError("Which text should be shown? Give --text.")
    if len(top_ks) > 2 or (against is not None and len(top_ks) > 1):
        raise ValueError("The page has two sides: give two values to --top-k, or --against and one value.")
    check_placement(device, device_map, dtype)
    if against is not None:
        require("scipy")
    loaded = TextSource(tuple(texts)).load()
    load = partial(load_adapted, base=base, device=device, device_map=device_map, dtype=dtype)
    model, tokenizer, folder = load(adapter, revision=revision)
    chosen: list[int | None] = list(top_ks) or [None]
    subjects = [_subject(model, adapter, folder, top_k, show_top_k=len(chosen) > 1) for top_k in chosen]
    models = [adapter, _base(model, base)]
    if against is not None:
        other, _, its_folder = load(against)
        if _base(other, base) != models[1]:
            raise ValueError(
                f"{adapter} and {against} name different base models. If it is one and the same, name it with --model."
            )
        subjects.append(_subject(other, against, its_folder, chosen[0], show_top_k=False))
        models.append(against)
    bar = progress.add_task("reading the text", total=None)
    data = explore(
        subjects,
        tokenizer,
        loaded.documents,
        name=loaded.name,
        max_tokens=max_tokens,
        window=window,
        tick=lambda tokens: progress.advance(bar, tokens),
    )
    progress.update(bar, description="writing the page", total=len(data.tokens) * passes(subjects))
    page = render(data)
    size = write(page, out)
    if space is not None:
        write_space(page, space, models, loaded.name)
    progress.stop()
    return _facts(data, page, size, out, space)


def _subject(model: Any, adapter: str, folder: Path, top_k: int | None, *, show_top_k: bool) -> Subject:
    report = GroupReport.from_json(folder / GROUPS_FILE) if (folder / GROUPS_FILE).is_file() else None
    name = adapter if is_hub_id(adapter) else Path(adapter).resolve().name  # folders stay on this machine
    return Subject(model, f"{name}, top_k={top_k}" if show_top_k else name, top_k, report)


def _base(model: Any, base: str | None) -> str:
    return base or str(model.config._name_or_path)


def _facts(data: ExplorerData, page: Page, size: int, out: Path, space: Path | None) -> dict[str, Any]:
    return {
        "page": str(out),
        "bytes": size,
        "space": None if space is None else str(space),
        "text": data.text,
        "tokens": len(data.tokens),
        "left_out": data.left_out,
        "windows": len(data.starts),
        "layers": len(data.layers),
        "targets": page.targets,
        "dense_perplexity": _rounded(perplexity(data.dense_losses)),
        "sides": [
            {
                "name": side.name,
                "top_k": side.top_k,
                "pairs": round(side.pairs, 4),
                "perplexity": _rounded(perplexity(side.losses)),
            }
            for side in data.sides
        ],
    }


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)
