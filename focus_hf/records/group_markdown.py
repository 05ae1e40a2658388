"""A group report as Markdown, for a card: the heads that matter most in a table, everything behind it folded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..escape import escape
from .group_facts import NAMELESS, LayerFacts

#: A `GroupReport`, which knows this module.
GroupReport = Any

#: Heads that are told one by one, and groups of each.
HEADS, GROUPS = 10, 3


def render(report: GroupReport, figures: Collection[str] = ()) -> str:
    """Markdown of a report, with those of its pictures that there are; all that comes from outside is escaped."""
    chosen = report.that_matter(HEADS)
    lines = [_about(report), ""]
    if chosen:
        lines += [*_heads(report, chosen), ""]
    lines += [f"{_how_sure(report)} {_nameless(report)}", ""]
    for layer in chosen:
        names = ", ".join(escape(layer.groups[group].name) for group in layer.most_read(GROUPS))
        summary = f"{escape(layer.short_title)}: {names or 'no group with a name'}"
        lines += _folded(summary, _one(report, layer, figures))
    lines += _folded(f"All {len(report.layers)} that were looked at", _table(report))
    return "\n".join(lines)


def _folded(summary: str, lines: Iterable[str]) -> list[str]:
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def picture(layer: LayerFacts) -> str:
    """The file of a head's picture of groups by distance."""
    return f"figures/head-{'-'.join(layer.numbers) or 'only'}.png"


def picture_data(layer: LayerFacts) -> list[Any]:
    """What that picture is made of, see `focus_hf.records.pictures`."""
    return [layer.name, [group.name for group in layer.groups], layer.reads, layer.attention]


def _about(report: GroupReport) -> str:
    text, by_head = report.text, any(layer.head is not None for layer in report.layers)
    name = escape(text.get("name") or "a text")
    if besides := text.get("besides"):
        name += f" and {escape(besides.get('name'))}"
    lines = (
        f"Each {'key/value head' if by_head else 'layer'} sorts the tokens before into {report.num_groups} groups by "
        f"what they are, and a token reads groups{' at distances' if len(report.bands) > 1 else ''}, not single "
        f"tokens. Looked at on {name} ({int(text['tokens']):,} tokens, windows of {int(text['window']):,})"
        + (f" at `{_code(report.setting)}`." if report.setting else ".")
    )
    if text.get("skipped"):
        lines += f" {int(text['skipped']):,} sentences could not be read and are left out."
    if report.heads_left_out:
        count = len(report.layers)
        lines += f" Of {count + report.heads_left_out} heads the {count} that look for distant tokens most."
    return lines


def _heads(report: GroupReport, chosen: list[LayerFacts]) -> Iterator[str]:
    yield _row("head", "looks back for (share of the group that the name fits; tokens back)", "loss without", "silent")
    yield "|---|---|---:|---:|"
    for layer in chosen:
        told = [
            f"**{escape(layer.groups[group].name)}** {100 * layer.groups[group].covers:.0f} %"
            + (f" ({_span(report, layer, group)})" if len(report.bands) > 1 else "")
            for group in layer.most_read(GROUPS)
        ]
        names = "; ".join(told) or "groups without a name"
        yield _row(escape(layer.short_title), names, _loss(layer), layer.told_silent)
    where = "by what the model loses" if chosen[0].loss is not None else "by distant attention"
    yield (
        f"\nThe {len(chosen)} that matter most, {where}. *Loss without*: nats per token more if this one reads "
        "nothing beyond window and first tokens. *Silent*: tokens that read nothing there."
    )


def _how_sure(report: GroupReport) -> str:
    """What groups are beside a look-up by token, said plainly."""
    contextual = [layer.contextual for layer in report.layers]
    low, high = 100 * min(contextual, default=0.0), 100 * max(contextual, default=0.0)
    context = f"{low:.0f} to {high:.0f} % of the tokens are by context in another group than most of their kind."
    found = [layer.nmi for layer in report.layers if layer.nmi]
    if not found:
        return f"How sure a name is, beside random groups and a look-up by token, stands in the folds; {context}"
    groups, random, lookup = (sum(column) / len(found) for column in zip(*found, strict=True))
    beaten = sum(by_token > by_group for by_group, _, by_token in found)
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
        yield f"![Attention of {escape(layer.short_title)} by group and distance]({picture(layer)})\n"
    told = layer.most_read(GROUPS)
    for number in told:
        group, far = layer.groups[number], 100 * sum(layer.attention[number])
        yield (
            f"- **{escape(group.name)}**: {100 * group.share:.1f} % of the tokens, {far:.1f} % of the attention, "
            f"{_span(report, layer, number)}. The name fits {100 * group.covers:.0f} % of them ("
            f"{100 * group.chance:.0f} % of a random group's, {100 * group.lookup:.0f} % of a look-up's by token); "
            f"{100 * group.contextual:.0f} % are there by context. {' / '.join(map(_marked, group.examples[:5]))}"
        )
    by_size = sorted(enumerate(layer.groups), key=lambda item: -item[1].share)
    others = [group for number, group in by_size if number not in told and group.name not in NAMELESS]
    if others:
        sizes = ", ".join(f"{escape(group.name)} {100 * group.share:.1f} %" for group in others)
        yield f"- Other groups, by size: {sizes}."
    mixed = [" ".join(f"`{_code(t['token'])}`" for t in g.lifted[:3]) for g in layer.groups if g.name == "mixed"]
    if mixed:
        yield f"- Mixed groups, by their most typical tokens: {'; '.join(mixed)}."
    for item in layer.split:
        both = (
            f"{escape(layer.groups[int(group)].name)}: {_marked(example)}"
            for group, example in item["examples"].items()
        )
        yield f"- `{_code(item['token'])}` depends on context. {'; '.join(both)}"
    for pair in layer.pairs:
        yield (
            f"- {_marked(pair['query'])} attends to {_marked(pair['key'])}, {int(pair['distance']):,} tokens back, "
            f"with weight {float(pair['weight']):.2f}."
        )


def _table(report: GroupReport) -> Iterator[str]:
    head = ["head", "far attention", "loss without", "silent", "largest group", "in context"]
    if has_gold := any(layer.nmi for layer in report.layers):
        head += ["NMI with kinds of words", "random groups", "look-up by token", "AMI"]
    yield _row(*head)
    yield "|---|" + "---:|" * (len(head) - 1)
    for layer in report.layers:
        cells = [escape(layer.title), f"{100 * layer.far:.1f} %", _loss(layer), layer.told_silent]
        cells += [f"{100 * layer.largest:.1f} %", f"{100 * layer.contextual:.0f} %"]
        if has_gold:
            cells += [f"{float(value):.3f}" for value in (*layer.nmi, layer.agreement["upos"]["groups"]["ami"])]
        yield _row(*cells)


def _span(report: GroupReport, layer: LayerFacts, group: int) -> str:
    first, last = layer.distances(group, report.bands)
    return f"{first:,} back and more" if last is None else f"{first:,} to {last:,} back"


def _loss(layer: LayerFacts) -> str:
    return layer.told_loss + ("" if layer.loss_error is None else f" ± {layer.loss_error:.4f}")


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


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
