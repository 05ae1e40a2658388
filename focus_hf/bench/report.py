"""Benchmark results for people: a table, Markdown, a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .launches import Launches
from .predict import Prediction
from .settings import Measurement

_COLUMNS = ("what", "tokens", "setting", "dense", "Focus", "ratio", "limit", "computed", "how")

#: Of counts; numbers with strokes between them are those of each batch size.
_LAUNCH_COLUMNS = ("what", "tokens", "routing", "path", "dense", "Focus", "host syncs", "waits for")

#: Of predictions, likewise.
_PREDICTED_COLUMNS: tuple[str, ...] = (
    *("prediction", "device", "tokens", "groups", "path", "batch"),
    *("predicted ratio", "in a CUDA graph", "limit", "launches", "measured"),
)

#: Columns of words; the others are numbers.
_WORDS = ("what", "setting", "how", "routing", "path", "waits for", "prediction", "device", "groups")

#: Titles of tables that would be taken for something else without one.
_PREDICTED = "Predictions, not measurements: routing and attention of one layer"
_TITLES: dict[tuple[str, ...], str] = {_PREDICTED_COLUMNS: _PREDICTED}

Result = Measurement | Launches | Prediction


def tables(results: Sequence[Result], width: int) -> list[Table]:
    """Rich tables of what was measured, counted, predicted; on a narrow screen without their last columns."""
    return [_table(columns if width >= 140 else columns[:-1], rows) for columns, rows in _parts(results)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=_TITLES.get(tuple(columns)) or _TITLES.get((*columns, "measured")))
    for column in columns:
        is_text = column in _WORDS
        result.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for cells in rows:
        result.add_row(*cells[: len(columns)])
    return result


def to_markdown(results: Sequence[Result]) -> str:
    """Markdown tables, likewise."""
    found = []
    for columns, rows in _parts(results):
        title = [f"{_TITLES[tuple(columns)]}\n"] if tuple(columns) in _TITLES else []
        lines = [*title, "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        found.append("\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]))
    return "\n\n".join(found)


def _parts(results: Sequence[Result]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Columns and rows of each table that has any."""
    measured = [_cells(result) for result in results if isinstance(result, Measurement)]
    counted = [_launch_cells(result) for result in results if isinstance(result, Launches)]
    predicted = [_predicted_cells(result) for result in results if isinstance(result, Prediction)]
    parts = (_COLUMNS, measured), (_LAUNCH_COLUMNS, counted), (_PREDICTED_COLUMNS, predicted)
    return [(columns, rows) for columns, rows in parts if rows]


def _predicted_cells(predicted: Prediction) -> list[str]:
    setting = predicted.setting
    return [
        predicted.phase,
        predicted.device.name,
        f"{setting.length:,}",
        f"K={setting.num_groups} k={setting.top_k}",
        predicted.path,
        " / ".join(str(batch) for batch in predicted.dense),
        _ratios(predicted.ratio),
        _ratios(predicted.recorded) if predicted.device.overlaps else "",
        f"{predicted.limit:.2f}x",
        _by_batch(predicted.launches),
        _ratios(predicted.measured),
    ]


def _ratios(ratios: dict[int, float]) -> str:
    return " / ".join(f"{ratio:.2f}x" for ratio in ratios.values())


def _launch_cells(counted: Launches) -> list[str]:
    setting = counted.setting
    return [
        counted.phase,
        f"{setting.length:,}",
        f"K={setting.num_groups} k={setting.top_k} {counted.routing}",
        counted.path,
        _by_batch(counted.dense),
        _by_batch(counted.focus),
        _by_batch(counted.syncs),
        ", ".join(f"{name} {count:,}" for name, count in sorted(counted.waits_for.items())),
    ]


def _by_batch(numbers: dict[int, int]) -> str:
    found = list(numbers.values())
    return f"{found[0]:,}" if len(set(found)) == 1 else " / ".join(f"{number:,}" for number in found)


def _cells(measured: Measurement) -> list[str]:
    setting = measured.setting
    shown = _megabytes if "memory" in measured.kind else _milliseconds
    steps = ", ".join(f"{name} {share:.0%}" for name, share in measured.shares.items())
    how = "; ".join(text for text in (measured.path, steps) if text) or f"against {measured.baseline}"
    return [
        measured.kind,
        f"{setting.length:,}",
        f"K={setting.num_groups} k={setting.top_k} w={setting.local_window} {setting.dtype}",
        shown(measured.dense),
        shown(measured.focus),
        f"{measured.ratio:.2f}x",
        "" if measured.limit is None else f"{measured.limit:.2f}x",
        "" if measured.computed is None else f"{measured.computed:.0%}",
        how,
    ]


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def _megabytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def save_plot(measurements: Iterable[Measurement], path: Path) -> None:
    """Ratio against length, one line for each kind and setting, with its limit dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[Measurement]] = {}
    for measured in measurements:
        setting = measured.setting
        name = f"{measured.kind}, K={setting.num_groups}, k={setting.top_k}"
        lines.setdefault(name, []).append(measured)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
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
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=150)
    pyplot.close(figure)
    temporary.replace(path)
