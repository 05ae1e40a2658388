"""Benchmark results for people: a table, Markdown, a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..files import save_figure
from .settings import Measurement

_COLUMNS = ("what", "tokens", "setting", "dense", "Focus", "ratio", "limit", "computed", "how")

#: Columns of words; the others are numbers.
_WORDS = ("what", "setting", "how")


def table(results: Sequence[Measurement], width: int) -> Table:
    """A rich table of what was measured; on a narrow screen without its last column."""
    columns = _COLUMNS if width >= 140 else _COLUMNS[:-1]
    shown = Table()
    for column in columns:
        is_text = column in _WORDS
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for measured in results:
        shown.add_row(*_cells(measured)[: len(columns)])
    return shown


def to_markdown(results: Sequence[Measurement]) -> str:
    """The table in Markdown, with all columns."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *map(_cells, results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cells(measured: Measurement) -> list[str]:
    setting = measured.setting
    steps = ", ".join(f"{name} {share:.0%}" for name, share in measured.shares.items())
    dial = f"k={setting.top_k}" if setting.pairs is None else f"pairs={setting.pairs}"
    return [
        measured.kind,
        f"{setting.length:,}",
        f"K={setting.num_groups} {dial} w={setting.local_window} {setting.dtype}",
        _quantity(measured.kind, measured.dense),
        _quantity(measured.kind, measured.focus),
        f"{measured.ratio:.2f}x",
        "" if measured.limit is None else f"{measured.limit:.2f}x",
        "" if measured.computed is None else f"{measured.computed:.0%}",
        "; ".join(text for text in (measured.path, steps) if text) or _against(measured),
    ]


def _against(measured: Measurement) -> str:
    """What was compared with, and what else was timed in the same run."""
    others = (f"{way.removesuffix(' (ms)')} {_quantity('', value)}" for way, value in measured.extra.items())
    return "; ".join([f"against {measured.baseline}", *others])


def _quantity(kind: str, value: float) -> str:
    if "memory" in kind:
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def save_plot(measurements: Iterable[Measurement], path: Path) -> None:
    """Ratio against length, one line for each kind and setting, with its limit dashed."""
    from matplotlib.figure import Figure

    lines: dict[str, list[Measurement]] = {}
    for measured in measurements:
        setting = measured.setting
        name = f"{measured.kind}, K={setting.num_groups}, k={setting.top_k}"
        lines.setdefault(name, []).append(measured)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        points.sort(key=lambda point: point.setting.length)
        lengths = [point.setting.length for point in points]
        (line,) = axes.plot(lengths, [point.ratio for point in points], marker="o", label=name)
        limits: list[Any] = [point.limit for point in points]
        if None not in limits:
            axes.plot(lengths, limits, linestyle="--", linewidth=1, color=line.get_color(), alpha=0.6)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel="tokens", ylabel="times faster than dense (dashed: limit)")
    axes.set_xscale("log", base=2)
    ticks = sorted({point.setting.length for points in lines.values() for point in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.legend(fontsize="small")
    save_figure(figure, path, dpi=150)
