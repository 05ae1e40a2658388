"""Find Focus adapters on the Hub: by base model, by settings, by what their groups mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from huggingface_hub import HfApi, ModelInfo

from ..escape import one_line
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, HUB_TAG, AdapterFileError, read_config
from ..records.group_facts import NAMELESS
from ..records.group_report import GroupReport
from ..records.typed import is_number
from .errors import HubError, hub_errors
from .files import LARGEST
from .remote import Hub, card, files, read_model, strings

#: Orders, best first.
SORTS = ("downloads", "likes", "date", "perplexity")

#: What the Hub calls them; it knows no perplexities.
_SERVER_SORTS = {"likes": "likes", "date": "lastModified"}

#: Repositories without our tag whose configuration a search reads.
MOST_UNTAGGED = 40

#: A group report larger than this is not read for a search.
_LARGEST_REPORT = 8_000_000


@dataclass
class Found:
    """One adapter.

    Args:
        repo_id: ``"org/name"``.
        base_model: Hub id.
        num_groups, top_k, local_window, parameters: of the adapter; ``None`` where its card does not say.
        perplexity_change: against dense attention, in per cent, on the card's first text.
        losses: by text, the same.
        pairs: the share of dense attention's pairs that it was measured with.
        context_length: tokens of the windows that it was measured on.
        groups: what its groups are about.
        downloads, likes: as the Hub counts them.
        updated: date of the last commit.
        license: as the card says.
        datasets: measured on.
        private, gated: who may see it.
        commit: that was looked at.
    """

    repo_id: str
    base_model: str | None = None
    num_groups: int | None = None
    top_k: int | None = None
    local_window: int | None = None
    parameters: int | None = None
    perplexity_change: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    pairs: float | None = None
    context_length: int | None = None
    groups: list[str] = field(default_factory=list)
    downloads: int = 0
    likes: int = 0
    updated: str = ""
    license: str | None = None
    datasets: list[str] = field(default_factory=list)
    private: bool = False
    gated: bool = False
    commit: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def search(
    base_model: str | None = None,
    *,
    text: str | None = None,
    tags: Sequence[str] = (),
    author: str | None = None,
    num_groups: int | None = None,
    top_k: int | None = None,
    group: str | None = None,
    sort: str = "downloads",
    limit: int = 20,
    token: str | None = None,
    endpoint: str | None = None,
) -> list[Found]:
    """Find Focus adapters. Reads cards and small JSON files, never weights.

    Adapters have the tag ``focus``. Where a base model, an author or a part of the name is given, repositories without
    it are found too, by their configuration.

    Args:
        base_model: Hub id of the base model.
        text: part of the repository's name.
        tags: all of them must be there.
        author: user or organisation.
        num_groups, top_k: of the adapter.
        group: only adapters with a group about this, as its report says: ``"punctuation"``, ``"verbs"``.
        sort: one of `SORTS`.
        limit: results, at most.
        token: access token; the one of ``hf auth login`` by default.
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.

    Returns:
        Adapters, best first.

    Raises:
        ValueError: an unknown order, or a limit below 1.
        HubError: the Hub refused or was not reached.
    """
    if sort not in SORTS:
        raise ValueError(f"sort must be one of {', '.join(SORTS)}, got {sort!r}.")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}.")
    api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
    hub = Hub(api)
    of_base = [f"base_model:adapter:{base_model}"] if base_model else []
    query = [("sort", _SERVER_SORTS.get(sort, "downloads"))]
    query += [(name, value) for name, value in (("author", author), ("search", text)) if value]
    query += [("full", "true"), ("cardData", "true")]
    # The configuration knows the base model too, of few enough repositories that the Hub need not sort them out.
    untagged = [*tags] if author or text else [*tags, *of_base] if of_base else None
    found: list[Found] = []
    with hub_errors(base_model or "The search", api.endpoint):
        for model in _candidates(hub, query, [HUB_TAG, *tags, *of_base], untagged):
            try:
                adapter = _read(model, hub)
                wanted = all(
                    value is None or value == getattr(adapter, name)
                    for name, value in (("num_groups", num_groups), ("top_k", top_k))
                )
                if not set(of_base) <= _tags(model) and adapter.base_model != base_model:
                    continue
                if not wanted:
                    continue
                if group is not None:
                    adapter.groups = [where for where in _groups(model, hub) if _matches(where, group)]
                    if not adapter.groups:
                        continue
            except (HubError, ValueError) as error:
                _leave_out(error, hub)
                continue
            found.append(adapter)
            if len(found) == limit and sort != "perplexity":
                break
    if sort == "perplexity":
        found.sort(key=lambda adapter: (adapter.perplexity_change is None, adapter.perplexity_change))
    return found[:limit]


def _candidates(
    hub: Hub, query: list[tuple[str, str]], tagged: list[str], untagged: list[str] | None
) -> Iterator[ModelInfo]:
    """Repositories with our tag; then those whose configuration says what they are.

    Args:
        hub: asks.
        query: order, author, part of the name.
        tagged: tags that a repository must have, ours among them.
        untagged: tags that one without ours must have; ``None`` if such are not looked for.
    """
    for model in _matching(hub, query, tagged):
        yield model
    if untagged is None:
        return
    looked_into = 0
    for model in _matching(hub, query, untagged):
        if HUB_TAG in _tags(model) or CONFIG_FILE not in files(model):
            continue
        if looked_into == MOST_UNTAGGED:
            warnings.warn(
                f"More than {MOST_UNTAGGED} repositories without the tag {HUB_TAG!r} match: the others were left out.",
                stacklevel=4,
            )
            return
        looked_into += 1
        if hub.is_focus(model):
            yield model


def _matching(hub: Hub, query: list[tuple[str, str]], tags: list[str]) -> Iterator[ModelInfo]:
    for said in hub.models([*(("filter", tag) for tag in tags), *query]):
        try:
            model = read_model(said)
        except (HubError, ValueError) as error:
            _leave_out(error, hub)
            continue
        if set(tags) <= _tags(model):  # there are Hubs without filters
            yield model


def _tags(model: ModelInfo) -> set[str]:
    return {*(model.tags or ()), *strings(card(model).get("tags"))}


def _leave_out(error: Exception, hub: Hub) -> None:
    """Say that a result cannot be read; raise if there is no time for others."""
    if hub.bounds.over:
        raise error
    warnings.warn(f"A result of the search is left out: {one_line(str(error))}", stacklevel=3)


def _read(model: ModelInfo, hub: Hub) -> Found:
    """What the card says; settings from the configuration where the card is silent."""
    about = card(model)
    said = about.get("focus")
    focus: dict[str, Any] = said if isinstance(said, dict) else {}
    values = {name: _number(focus.get(name), int) for name in ("num_groups", "top_k", "local_window")}
    base = about.get("base_model")
    missing = any(
        value is None for name, value in values.items() if name != "top_k" or focus.get("routing") != "cells"
    )
    if missing and model.sha and CONFIG_FILE in files(model):
        try:
            config = read_config(hub.fetch(model, CONFIG_FILE, LARGEST[CONFIG_FILE]).parent)
            values = {name: getattr(config, name) for name in values}
            values |= {"top_k": None} if config.by_cells else {}
            base = base or config.base_model_name_or_path
        except (AdapterFileError, HubError):  # gated, or not an adapter that we can read: listed all the same
            if hub.bounds.over:
                raise
    license, told = about.get("license"), focus.get("losses")
    losses: dict[Any, Any] = told if isinstance(told, dict) else {}
    return Found(
        model.id,
        next(iter(strings(base)), None),
        **values,
        parameters=_number(focus.get("parameters"), int),
        perplexity_change=_number(focus.get("perplexity_change"), float),
        losses={text: loss for text, loss in losses.items() if isinstance(text, str) and is_number(loss)},
        pairs=_number(focus.get("pairs"), float),
        context_length=_number(focus.get("context_length"), int),
        groups=strings(focus.get("groups")),
        downloads=model.downloads or 0,
        likes=model.likes or 0,
        updated=f"{model.last_modified:%Y-%m-%d}" if model.last_modified else "",
        license=license if isinstance(license, str) else None,
        datasets=strings(about.get("datasets")),
        private=bool(model.private),
        gated=bool(model.gated),
        commit=model.sha or "",
    )


def _number(value: Any, kind: type) -> Any:
    """A number from a card, which may say anything."""
    return kind(value) if is_number(value) else None


def _groups(model: ModelInfo, hub: Hub) -> Iterator[str]:
    """What each group of an adapter is about, and where it is: ``"punctuation (layer 2, group 3)"``."""
    if not model.sha or GROUPS_FILE not in files(model):
        return
    report = GroupReport.from_json(hub.fetch(model, GROUPS_FILE, _LARGEST_REPORT))
    for number, layer in enumerate(report.layers):
        where = f"layer {number}" if layer.head is None else layer.title
        for place, group in enumerate(layer.groups):
            if group.name not in NAMELESS:
                yield f"{group.name} ({where}, group {place})"


def _matches(where: str, wanted: str) -> bool:
    """Whether a group is about this, in the singular or plural."""
    return where.partition(" (")[0].lower().rstrip("s") == wanted.lower().rstrip("s")
