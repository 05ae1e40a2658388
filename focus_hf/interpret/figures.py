"""Pictures of a group report. Needs the extra ``focus-hf[viz]``.

White ground, numbers or hatches beside every colour, and colours that colour-blind eyes tell apart, so that a picture
can be read on a dark page, in print, and without colour.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_atomically
from ..records.group_report import GroupReport, LayerFacts

#: Okabe and Ito's colours, and two greys.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
    "#999999",
    "#DDDDDD",
)
_HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++", "--", "**", "||")

#: Layers drawn where each has a picture of its own.
_FEW = 8


def save_plots(report: GroupReport, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every picture that the report has data for.

    Returns:
        The paths: ``groups-map.png``, ``groups-flow.png``, ``groups-strip.png`` (the layer in the middle), and of a
        treebank ``groups-categories.png``.
    """
    target = Path(folder)
    made = [map_figure(report, target / "groups-map.png")]
    if any(layer.flow for layer in report.layers):
        made.append(flow_figure(report, target / "groups-flow.png"))
    if any(group.upos for layer in report.layers for group in layer.groups):
        made.append(category_figure(report, target / "groups-categories.png"))
    middle = report.layers[len(report.layers) // 2]
    made.append(strip_figure(report.strip, middle.strip, target / "groups-strip.png", title=short_name(middle)))
    return made


def map_figure(report: GroupReport, path: str | os.PathLike[str]) -> Path:
    """Layers by groups: how large each group is, and beside it how pure (of a treebank) or how confident."""
    layers = report.layers
    sizes = np.array([[100 * group.share for group in layer.groups] for layer in layers])
    has_gold = any(group.upos for layer in layers for group in layer.groups)
    second = np.array(
        [
            [100 * (max(group.upos.values(), default=0.0) if has_gold else group.confidence) for group in layer.groups]
            for layer in layers
        ]
    )
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1,
        2,
        figsize=(4 + 0.9 * report.num_groups, 1.6 + 0.3 * len(layers)),
        dpi=130,
        layout="constrained",
        sharey=True,
    )
    titles = ("tokens in the group (%)", "words of its first category (%)" if has_gold else "confidence (%)")
    for axis, values, title in zip(axes, (sizes, second), titles, strict=True):
        _heat(axis, values, small=len(layers) > 40)
        axis.set(title=title, xlabel="group", xticks=range(report.num_groups))
    axes[0].set_yticks(range(len(layers)), [short_name(layer) for layer in layers], fontsize=7)
    return _save(figure, path)


def category_figure(report: GroupReport, path: str | os.PathLike[str]) -> Path:
    """What each group is made of, by part of speech; of many layers a few are shown."""
    layers = _some(report.layers)
    names = _frequent_categories(layers)
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(layers), 1, figsize=(8, 0.9 + 1.5 * len(layers)), dpi=130, layout="constrained", squeeze=False, sharex=True
    )
    for axis, layer in zip(axes[:, 0], layers, strict=True):
        left = np.zeros(report.num_groups)
        for place, name in enumerate([*names, "others"]):
            shares = np.array([100 * group.upos.get(name, 0.0) for group in layer.groups])
            if name == "others":
                shares = np.maximum(100 - left, 0)
            axis.barh(
                range(report.num_groups),
                shares,
                left=left,
                color=COLOURS[place % len(COLOURS)],
                hatch=_HATCHES[place % len(_HATCHES)],
                edgecolor="white",
                linewidth=0.3,
                label=name,
            )
            left += shares
        axis.set(ylabel=short_name(layer), xlim=(0, 100), yticks=range(report.num_groups))
        axis.tick_params(labelsize=6)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("words of the group (%)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return _save(figure, path)


def flow_figure(report: GroupReport, path: str | os.PathLike[str]) -> Path:
    """From layer to layer: of the tokens of a group (row), how many per cent are in each group (column) next."""
    layers = _some([layer for layer in report.layers if layer.flow])
    pyplot = _pyplot()
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.7 * columns, 2.8 * rows), dpi=130, layout="constrained", squeeze=False
    )
    following = {one.name: short_name(two) for one, two in zip(report.layers, report.layers[1:], strict=False)}
    for axis in axes.ravel()[len(layers) :]:
        axis.axis("off")
    for axis, layer in zip(axes.ravel(), layers, strict=False):
        flow = np.array(layer.flow, dtype=float)
        _heat(axis, 100 * flow / np.maximum(flow.sum(axis=1, keepdims=True), 1), small=True)
        axis.set(title=f"{short_name(layer)} to {following[layer.name]}", xlabel="next group", ylabel="group")
        axis.set(xticks=range(flow.shape[1]), yticks=range(flow.shape[0]))
        axis.title.set_fontsize(8)
        axis.tick_params(labelsize=6)
    return _save(figure, path)


def strip_figure(
    tokens: Sequence[str], groups: Sequence[int], path: str | os.PathLike[str], *, title: str = "", width: int = 90
) -> Path:
    """A text, each token on the colour of its group, with the group's number under it.

    Args:
        tokens: as `focus_hf.interpret.tokens.display` shows them.
        groups: the group of each.
        path: file to write.
        title: above the picture.
        width: characters of a line.
    """
    pyplot = _pyplot()
    lines: list[list[tuple[int, str, int]]] = [[]]
    column = 0
    for token, group in zip(tokens, groups, strict=True):
        if column + len(token) + 1 > width and lines[-1]:
            lines.append([])
            column = 0
        lines[-1].append((column, token, group))
        column += len(token) + 1
    figure, axis = pyplot.subplots(figsize=(width * 0.1, 0.6 + 0.42 * len(lines)), dpi=130, layout="constrained")
    for row, line in enumerate(lines):
        for start, token, group in line:
            colour = COLOURS[group % len(COLOURS)]
            axis.add_patch(
                pyplot.Rectangle((start, -row), len(token) + 0.6, 0.62, color=colour, alpha=0.35, linewidth=0)
            )
            shown = token.replace("$", r"\$")  # no mathematics in strangers' text
            axis.text(start + 0.3, -row + 0.3, shown, family="monospace", fontsize=8, va="center")
            axis.text(
                start + 0.3, -row - 0.14, str(group), family="monospace", fontsize=5, va="center", color="#333333"
            )
    axis.set(xlim=(0, width), ylim=(-len(lines) + 0.5, 1), title=title.replace("$", r"\$"))
    axis.axis("off")
    return _save(figure, path)


def _heat(axis: Any, values: np.ndarray, small: bool) -> None:
    axis.imshow(values, cmap="cividis", vmin=0, vmax=max(float(values.max()), 1.0), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        bright = value > 0.6 * values.max()
        axis.text(
            column,
            row,
            f"{value:.0f}",
            ha="center",
            va="center",
            fontsize=5 if small else 7,
            color="k" if bright else "w",
        )


def _some(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """At most a few layers, spread over all."""
    if len(layers) <= _FEW:
        return list(layers)
    return [layers[round(place)] for place in np.linspace(0, len(layers) - 1, _FEW)]


def _frequent_categories(layers: Sequence[LayerFacts]) -> list[str]:
    totals: dict[str, float] = {}
    for layer in layers:
        for group in layer.groups:
            for name, share in group.upos.items():
                totals[name] = totals.get(name, 0.0) + share * group.share
    return sorted(totals, key=lambda name: (-totals[name], name))[: len(COLOURS) - 1]


def short_name(layer: LayerFacts) -> str:
    """The layer's number, if its name has one."""
    numbers = [part for part in layer.name.split(".") if part.isdigit()]
    short = f"layer {numbers[0]}" if numbers else layer.name[-16:]
    return short if layer.head is None else f"{short}, head {layer.head}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str | os.PathLike[str]) -> Path:
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    _pyplot().close(figure)
    write_atomically(Path(path), content.getvalue())
    return Path(path)
