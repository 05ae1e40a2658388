"""A group report as Markdown, for a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..escape import escape
from .group_facts import GroupFacts, LayerFacts


def render(text: dict[str, Any], layers: Sequence[LayerFacts], heads_left_out: int = 0) -> str:
    """Tables of layers and groups; the groups of each layer are folded away.

    Args:
        text: what was read, see `GroupReport`.
        layers: in order.
        heads_left_out: heads with groups that are not among them.
    """
    name = escape(text.get("name") or "a text")
    lines = [f"Groups on {name} ({int(text['tokens']):,} tokens, windows of {int(text['window']):,})."]
    if text.get("skipped"):
        lines[0] += f" {int(text['skipped']):,} sentences could not be read and are left out."
    if heads_left_out:
        lines[0] += (
            f" Of {len(layers) + heads_left_out} heads with groups, the {len(layers)} that attend furthest away."
        )
    lines += ["", *_layers(layers), ""]
    for number, layer in enumerate(layers):
        lines += [
            "<details>",
            f"<summary>{escape(layer.title)}: {_summary(layer)}</summary>",
            "",
            *_groups(layer),
            "",
            *_splits(layer),
            *_pairs(layer),
            "</details>",
            "" if number < len(layers) - 1 else "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _summary(layer: LayerFacts) -> str:
    labels = [escape(group.label) for group in layer.groups if group.label not in ("mixed", "empty")]
    return ", ".join(labels) if labels else "mixed groups"


def _layers(layers: Sequence[LayerFacts]) -> list[str]:
    has_gold = any("upos" in layer.agreement for layer in layers)
    head = ["layer", "largest group", "in context"]
    if has_gold:
        head += ["NMI with parts of speech", "random groups", "lookup by token", "AMI"]
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    for layer in layers:
        cells = [escape(layer.title), f"{100 * layer.largest:.1f} %", f"{100 * layer.contextual:.0f} %"]
        if has_gold:
            found = layer.agreement["upos"]
            cells += [f"**{float(found['groups']['nmi']):.3f}**"]
            cells += [f"{float(found[baseline]['nmi']):.3f}" for baseline in ("random", "lookup")]
            cells += [f"{float(found['groups']['ami']):.3f}"]
        lines.append(_row(cells))
    lines += ["", "*In context*: tokens that are in another group than most of their kind; 0 is a lookup by token."]
    return lines


def _groups(layer: LayerFacts) -> list[str]:
    head = ["group", "share", "confidence", "about", "evidence", "typical tokens", "example"]
    lines = [_row(head), "|---:|---:|---:|---|---|---|---|"]
    for number, group in enumerate(layer.groups):
        tokens = " ".join(f"`{_code(item['token'])}`" for item in group.lifted[:6] or group.top[:6])
        example = group.examples[0] if group.examples else None
        lines.append(
            _row(
                [
                    str(number),
                    f"{100 * group.share:.1f} %",
                    f"{group.confidence:.2f}",
                    escape(group.label),
                    _evidence(group),
                    tokens,
                    "" if example is None else _marked(example),
                ]
            )
        )
    return lines


def _evidence(group: GroupFacts) -> str:
    found = group.labels.get("upos")
    if not found or not found.get("category"):
        return ""
    low, high = (float(end) for end in found["interval"])
    share, lift = 100 * float(found["share"]), float(found["lift"])
    return f"{escape(found['category'])} {share:.0f} %, lift {lift:.1f} ({low:.1f} to {high:.1f})"


def _splits(layer: LayerFacts) -> list[str]:
    lines = []
    for item in layer.split:
        shown = "; ".join(f"group {int(group)}: {_marked(example)}" for group, example in item["examples"].items())
        lines.append(f"- `{_code(item['token'])}` depends on context. {shown}")
    return [*lines, ""] if lines else []


def _pairs(layer: LayerFacts) -> list[str]:
    lines = [
        f"- {_marked(pair['query'])} attends to {_marked(pair['key'])}, {int(pair['distance']):,} tokens back "
        f"(group {int(pair['group'])}, weight {float(pair['weight']):.2f})"
        for pair in layer.pairs
    ]
    return [*lines, ""] if lines else []


def _marked(example: dict[str, Any]) -> str:
    """A token between its neighbours, in bold."""
    before, token, after = (str(example[part]) for part in ("before", "token", "after"))
    space_before = " " if before.endswith(" ") or token.startswith("␣") else ""
    space_after = " " if after.startswith(" ") else ""
    bold = escape(token.removeprefix("␣")) or "␣"
    return f"{escape(before)}{space_before}**{bold}**{space_after}{escape(after)}"


def _code(token: object) -> str:
    """Inside backticks nothing is markup but a backtick; in a table a pipe ends the cell, a line break the row."""
    text = "".join(" " if c.isspace() else c if c.isprintable() else "�" for c in str(token))
    return text.replace("`", "ˋ").replace("|", "∣").replace("<", "‹").replace(">", "›").replace("&", "＆")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
