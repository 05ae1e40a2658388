"""`focus-hf groups`: an adapter and a text or treebank in; a report on the screen and in files out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..evaluate.run import Load
from ..files import write_atomically
from ..machine import require
from ..output import deliver
from ..records import check_writable
from ..records.adapter_files import GROUPS_FILE, weights_hash
from ..records.group_report import GroupReport
from ..texts import TextSource, hash_of
from .figures import save_plots
from .match import SAME, LayerMatch, match_adapters
from .run import group_report
from .treebank import read_treebank


def run_groups(
    adapter: str,
    *,
    load: Load,
    progress: Progress,
    texts: Sequence[str] = (),
    treebanks: Sequence[str] = (),
    window: int = 1024,
    heads: int | None = None,
    seed: int = 0,
    json_out: str | None = None,
    markdown: str | None = None,
    plots: Path | None = None,
    write: bool = False,
) -> GroupReport:
    """Report on an adapter's groups and deliver what was asked for.

    Args:
        adapter: folder or Hub id.
        load: gives model, tokenizer and folder of the adapter, see `focus_hf.hub.load_adapted`; called when all else
            was found in order.
        progress: shows how far it is.
        texts: text files.
        treebanks: ``.conllu`` files; texts are then read besides them.
        window, heads, seed: see `group_report`.
        json_out, markdown: file, or ``"-"`` for standard output, where then nothing else goes.
        plots: folder for pictures.
        write: put the report (and the pictures) into the adapter's folder, from where the card takes it.

    Raises:
        ValueError: neither text nor treebank, or bad input.
    """
    if not texts and not treebanks:
        raise ValueError("Give --text, --treebank or both.")
    if json_out == markdown == "-":
        raise ValueError("Only one of --json and --markdown can go to the screen.")
    require(*(["matplotlib"] if plots is not None or write else []), *(["conllu", "sklearn"] if treebanks else []))
    if write:
        check_writable(adapter)
    treebank = read_treebank(*treebanks) if treebanks else None
    skipped = treebank.skipped if treebank else []
    more = [f"{len(skipped) - 5} more sentences"] if len(skipped) > 5 else []
    for problem in (*skipped[:5], *more):
        progress.console.print(f"left out: {problem}", markup=False, highlight=False)
    text = TextSource(tuple(texts)).load() if texts else None
    model, tokenizer, folder = load(adapter)
    bar = progress.add_task("tokens", total=None)
    report = group_report(
        model,
        tokenizer,
        treebank or [],
        texts=text.documents if text else (),
        name=", ".join(Path(file).name for file in treebanks) or (text.name if text else ""),
        revision=hash_of(treebanks or texts),
        window=window,
        heads=heads,
        seed=seed,
        tick=lambda tokens: progress.advance(bar, tokens),
    )
    report.weights_sha256 = weights_hash(folder)
    if treebank and text:
        report.text["besides"] = {"name": text.name, "revision": text.revision}
    progress.stop()
    deliver(report.to_json(), json_out, [] if markdown == "-" else [summary_table(report)])
    if markdown == "-":
        sys.stdout.write(report.to_markdown())
    elif markdown is not None:
        write_atomically(Path(markdown), report.to_markdown().encode())
    if plots is not None:
        save_plots(report, plots)
    if write:
        report.to_json(folder / GROUPS_FILE)
        save_plots(report, folder)
    return report


def summary_table(report: GroupReport) -> Table:
    """One line for each layer or head; NMI is with parts of speech."""
    title = f"Groups on {report.text['name']}, {report.text['tokens']:,} tokens"
    table = Table(title=Text(title), title_justify="left")
    gold_columns = ("NMI", "random", "look-up") if any(layer.nmi for layer in report.layers) else ()
    for column in ("layer", "loss without", "silent", "in context", *gold_columns, "reads most"):
        table.add_column(column, justify="left" if column in ("layer", "reads most") else "right", overflow="fold")
    for layer in report.layers:
        cells = [layer.told_loss, layer.told_silent, f"{100 * layer.contextual:.0f} %"]
        cells += [f"{value:.3f}" for value in layer.nmi]
        names = Text(", ".join(layer.groups[group].name for group in layer.most_read(3)))
        table.add_row(Text(layer.short_title), *cells, names)
    return table


def run_match(
    adapter: str, against: str, texts: Sequence[str], *, load: Load, window: int = 1024, json_out: str | None = None
) -> list[LayerMatch]:
    """Compare the groups of two adapters of one base model, and deliver a table or JSON.

    Args:
        adapter, against: folders or Hub ids.
        texts: text files that both read.
        load, window, json_out: see `run_groups`.

    Raises:
        ValueError: no text, or the adapters route different layers.
    """
    if not texts:
        raise ValueError("Two adapters are compared on a text: give --text.")
    require("scipy")
    documents = TextSource(tuple(texts)).load().documents
    first, tokenizer, _ = load(adapter)
    second, _, _ = load(against)
    layers = match_adapters(first, second, tokenizer, documents, window)
    document = json.dumps({"layers": [layer.to_dict() for layer in layers]}) + "\n"
    table = Table(title=Text(f"Groups of {adapter} in {against}"), title_justify="left")
    for column in ("layer", "group: counterpart (overlap)", "new"):
        table.add_column(column, overflow="fold")
    for layer in layers:
        same = ", ".join(f"{m.group}: {m.other} ({m.overlap:.2f})" for m in layer.matches if m.overlap >= SAME)
        table.add_row(Text(layer.name), same, ", ".join(map(str, layer.new)))
    deliver(document, json_out, [table])
    return layers
