"""A group report as Markdown, for a card: the heads that matter most in a table, everything behind it folded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..escape import escape
from .group_facts import NAMELESS, LayerFacts

#: A `GroupReport`, which knows this module.
GroupReport = Any

#: Heads that are told one by one, and groups of each.
HEADS, GROUPS = 10, 3


def render(report: GroupReport, figures: Collection[str] = ()) -> str:
    """Markdown of a report.

    Args:
        report: everything in it that comes from outside is escaped.
        figures: pictures that there are, see `picture`.
    """
    chosen = report.that_matter(HEADS)
    lines = [_about(report), ""]
    if chosen:
        lines += [*_heads(report, chosen), ""]
    lines += [f"{_how_sure(report)} {_nameless(report)}", ""]
    for layer in chosen:
        lines += [
            "<details>",
            f"<summary>{escape(layer.short_title)}: {_names(layer) or 'no group with a name'}</summary>",
            "",
            *_one(report, layer, figures),
            "</details>",
            "",
        ]
    lines += ["<details>", f"<summary>All {len(report.layers)} that were looked at</summary>", ""]
    return "\n".join([*lines, *_table(report), "", "</details>"]) + "\n"


def picture(layer: LayerFacts) -> str:
    """The file of a head's picture of groups by distance."""
    numbers = [part for part in layer.name.split(".") if part.isdigit()]
    return f"figures/head-{'-'.join(numbers) or 'only'}.png"


def picture_data(layer: LayerFacts) -> list[Any]:
    """What that picture is made of, see `focus_hf.records.pictures`."""
    return [layer.name, [group.name for group in layer.groups], layer.reads, layer.attention]


def _about(report: GroupReport) -> str:
    text = report.text
    name = escape(text.get("name") or "a text")
    if besides := text.get("besides"):
        name += f" and {escape(besides.get('name'))}"
    by_head = report.layers[0].head is not None if report.layers else False
    who = "Each key/value head" if by_head else "Each layer"
    lines = (
        f"{who} sorts the tokens before into {report.num_groups} groups by what they are, and a token reads groups"
        f"{' at distances' if len(report.bands) > 1 else ''}, not single tokens. "
        f"Looked at on {name} ({int(text['tokens']):,} tokens, windows of {int(text['window']):,})"
    )
    lines += f" at `{_code(report.setting)}`." if report.setting else "."
    if text.get("skipped"):
        lines += f" {int(text['skipped']):,} sentences could not be read and are left out."
    if report.heads_left_out:
        lines += (
            f" Of {len(report.layers) + report.heads_left_out} heads the {len(report.layers)} that look for "
            "distant tokens most."
        )
    return lines


def _heads(report: GroupReport, chosen: list[LayerFacts]) -> Iterator[str]:
    measured = chosen[0].loss is not None
    yield _row(
        ["head", "looks back for (share of the group that the name fits; tokens back)", "loss without", "silent"]
    )
    yield "|---|---|---:|---:|"
    for layer in chosen:
        told = [
            f"**{escape(layer.groups[group].name)}** {100 * layer.groups[group].covers:.0f} %"
            + (f" ({_span(report, layer, group)})" if len(report.bands) > 1 else "")
            for group in layer.most_read(GROUPS)
        ]
        yield _row(
            [escape(layer.short_title), "; ".join(told) or "groups without a name", _loss(layer), _silent(layer)]
        )
    yield ""
    where = "by what the model loses" if measured else "by distant attention"
    yield (
        f"The {len(chosen)} that matter most, {where}. *Loss without*: nats per token more if this one reads nothing "
        "beyond window and first tokens. *Silent*: tokens that read nothing there."
    )


def _how_sure(report: GroupReport) -> str:
    """What groups are beside a look-up by token, said plainly."""
    contextual = [layer.contextual for layer in report.layers]
    low, high = 100 * min(contextual, default=0.0), 100 * max(contextual, default=0.0)
    context = f"{low:.0f} to {high:.0f} % of the tokens are by context in another group than most of their kind."
    found = [layer.agreement["upos"] for layer in report.layers if "upos" in layer.agreement]
    if not found:
        return f"How sure a name is, beside random groups and a look-up by token, stands in the folds; {context}"
    groups, random, lookup = (
        sum(float(one[which]["nmi"]) for one in found) / len(found) for which in ("groups", "random", "lookup")
    )
    beaten = sum(float(one["lookup"]["nmi"]) > float(one["groups"]["nmi"]) for one in found)
    plain = "groups are mostly kinds of tokens" if 2 * beaten > len(found) else "groups know more than kinds of tokens"
    return (
        f"Agreement with kinds of words (normalised mutual information, mean): groups {groups:.2f}, random groups "
        f"{random:.2f}, a look-up by token {lookup:.2f}, which is better in {beaten} of {len(found)}: {plain}; "
        f"{context}"
    )


def _nameless(report: GroupReport) -> str:
    groups = [group for layer in report.layers for group in layer.groups]
    mixed = [group for group in groups if group.name == "mixed"]
    empty = sum(group.name == "empty" for group in groups)
    share = 100 * sum(group.share for group in mixed) / max(len(report.layers), 1)
    return (
        f"Of {len(groups):,} groups {len(groups) - len(mixed) - empty:,} have a name, which fits at least half of "
        f"their tokens; {len(mixed):,} are mixed ({share:.0f} % of the tokens) and {empty:,} empty on this text. "
        "Nothing asks that a group have a name: what counts is that what is not read is not missed."
    )


def _one(report: GroupReport, layer: LayerFacts, figures: Collection[str]) -> Iterator[str]:
    if picture(layer) in figures:
        yield f"![Attention of {escape(layer.short_title)} by group and distance]({picture(layer)})"
        yield ""
    for number in layer.most_read(GROUPS):
        group = layer.groups[number]
        far = 100 * sum(layer.attention[number])
        examples = " / ".join(_marked(example) for example in group.examples[:5])
        yield (
            f"- **{escape(group.name)}**: {100 * group.share:.1f} % of the tokens, {far:.1f} % of the attention, "
            f"{_span(report, layer, number)}. The name fits {100 * group.covers:.0f} % of them ("
            f"{100 * group.chance:.0f} % of a random group's, {100 * group.lookup:.0f} % of a look-up's by token); "
            f"{100 * group.contextual:.0f} % are there by context. {examples}"
        )
    shown = set(layer.most_read(GROUPS))
    others = [
        f"{escape(group.name)} {100 * group.share:.1f} %"
        for number, group in sorted(enumerate(layer.groups), key=lambda item: -item[1].share)
        if number not in shown and group.name not in NAMELESS
    ]
    if others:
        yield f"- Other groups, by size: {', '.join(others)}."
    mixed = [" ".join(f"`{_code(t['token'])}`" for t in g.lifted[:3]) for g in layer.groups if g.name == "mixed"]
    if mixed:
        yield f"- Mixed groups, by their most typical tokens: {'; '.join(mixed)}."
    for item in layer.split:
        both = "; ".join(
            f"{escape(layer.groups[int(group)].name)}: {_marked(example)}"
            for group, example in item["examples"].items()
        )
        yield f"- `{_code(item['token'])}` depends on context. {both}"
    for pair in layer.pairs:
        yield (
            f"- {_marked(pair['query'])} attends to {_marked(pair['key'])}, {int(pair['distance']):,} tokens back, "
            f"with weight {float(pair['weight']):.2f}."
        )
    yield ""


def _table(report: GroupReport) -> Iterator[str]:
    has_gold = any("upos" in layer.agreement for layer in report.layers)
    head = ["head", "far attention", "loss without", "silent", "largest group", "in context"]
    head += ["NMI with kinds of words", "random groups", "look-up by token", "AMI"] if has_gold else []
    yield _row(head)
    yield "|---|" + "---:|" * (len(head) - 1)
    for layer in report.layers:
        cells = [escape(layer.title), f"{100 * layer.far:.1f} %", _loss(layer), _silent(layer)]
        cells += [f"{100 * layer.largest:.1f} %", f"{100 * layer.contextual:.0f} %"]
        if has_gold:
            found = layer.agreement["upos"]
            cells += [f"{float(found[which]['nmi']):.3f}" for which in ("groups", "random", "lookup")]
            cells += [f"{float(found['groups']['ami']):.3f}"]
        yield _row(cells)


def _names(layer: LayerFacts) -> str:
    return ", ".join(escape(layer.groups[group].name) for group in layer.most_read(GROUPS))


def _span(report: GroupReport, layer: LayerFacts, group: int) -> str:
    first, last = layer.distances(group, report.bands)
    return f"{first:,} back and more" if last is None else f"{first:,} to {last:,} back"


def _loss(layer: LayerFacts) -> str:
    if layer.loss is None:
        return ""
    return f"{layer.loss:+.4f}" + ("" if layer.loss_error is None else f" ± {layer.loss_error:.4f}")


def _silent(layer: LayerFacts) -> str:
    return "" if layer.silent is None else f"{100 * layer.silent:.0f} %"


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
