"""Find Focus adapters on the Hub: by base model, by settings, by what their groups mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeVar

from huggingface_hub import ModelInfo

from ..escape import one_line, shown
from ..front_matter import strings
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, HUB_TAG, read_config, read_json
from ..records.group_facts import NAMELESS
from ..records.group_report import GroupReport
from ..records.typed import is_number
from .errors import HubError
from .remote import Hub, card, check_model, files

#: Orders, best first, and what the Hub calls them; it knows no perplexities.
SORTS = {"downloads": "downloads", "likes": "likes", "date": "lastModified", "perplexity": "downloads"}

#: Numbers that a card states of its adapter, by their names in `Found`.
_NUMBERS = {
    **dict.fromkeys(("num_groups", "top_k", "local_window", "parameters", "context_length"), int),
    **dict.fromkeys(("perplexity_change", "pairs"), float),
}

#: Repositories without our tag whose configuration a search reads.
MOST_UNTAGGED = 40

#: A group report larger than this is not read for a search.
_LARGEST_REPORT = 8_000_000

T = TypeVar("T")


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
    hub = Hub(endpoint, token)
    of_base = [f"base_model:adapter:{base_model}"] if base_model else []
    query = {"sort": SORTS[sort], "full": "true", "cardData": "true"}
    query |= {name: value for name, value in (("author", author), ("search", text)) if value}
    # The configuration knows the base model too, of few enough repositories that the Hub need not sort them out.
    untagged = [*tags] if author or text else [*tags, *of_base] if of_base else None
    found: list[Found] = []
    with hub.errors(base_model or "The search"):
        for model in _candidates(hub, query, [HUB_TAG, *tags, *of_base], untagged):
            try:
                adapter = _read(model, hub)
                fits = not of_base or adapter.base_model == base_model or set(of_base) <= _tags(model)
                fits &= num_groups in (None, adapter.num_groups) and top_k in (None, adapter.top_k)
                if fits and group is not None:
                    adapter.groups = [where for where in _groups(model, hub) if _matches(where, group)]
                    fits = bool(adapter.groups)
            except (HubError, ValueError) as error:
                _leave_out(error, hub)
                continue
            found += [adapter] if fits else []
            if len(found) == limit and sort != "perplexity":
                break
    if sort == "perplexity":
        found.sort(key=lambda adapter: (adapter.perplexity_change is None, adapter.perplexity_change))
    return found[:limit]


def _candidates(hub: Hub, query: dict[str, str], tagged: list[str], untagged: list[str] | None) -> Iterator[ModelInfo]:
    """Repositories that have all of some tags, ours among them; then those without ours that have all of others
    (``None``: such are not looked for) and whose configuration says what they are."""
    yield from _matching(hub, query, tagged)
    found = _matching(hub, query, untagged) if untagged is not None else iter(())
    others = (model for model in found if HUB_TAG not in _tags(model) and CONFIG_FILE in files(model))
    yield from (model for model in islice(others, MOST_UNTAGGED) if _is_focus(model, hub))
    if next(others, None) is not None:
        warnings.warn(
            f"More than {MOST_UNTAGGED} repositories without the tag {HUB_TAG!r} match: the others were left out.",
            stacklevel=4,
        )


def _matching(hub: Hub, query: dict[str, str], tags: list[str]) -> Iterator[ModelInfo]:
    for said in hub.models(filter=tags, **query):
        try:
            model = read_model(said)
        except HubError as error:
            _leave_out(error, hub)
            continue
        if set(tags) <= _tags(model):  # there are Hubs without filters
            yield model


def read_model(said: Any) -> ModelInfo:
    """One result of a search; raises `HubError` if it makes no sense."""
    try:
        model = ModelInfo(**said)
    except Exception as error:  # the library's readers fail in many ways
        raise HubError(f"The Hub describes a repository in a way that makes no sense: {shown(error)}") from None
    check_model(model)
    return model


def _tags(model: ModelInfo) -> set[str]:
    return {*(model.tags or ()), *strings(card(model).get("tags"))}


def _is_focus(model: ModelInfo, hub: Hub) -> bool:
    """Whether a repository with a configuration holds a Focus adapter, as that says."""
    said = _tried(lambda: read_json(hub.fetch(model, CONFIG_FILE)), hub)
    return isinstance(said, dict) and said.get("peft_type") == "FOCUS"


def _tried(read: Callable[[], T], hub: Hub) -> T | None:
    """What can be read of a file, ``None`` if it is gated or not what it should be; raises if no time is left."""
    try:
        return read()
    except (HubError, ValueError):
        if hub.bounds.over:
            raise
        return None


def _leave_out(error: Exception, hub: Hub) -> None:
    """Say that a result cannot be read; raise if there is no time for others."""
    if hub.bounds.over:
        raise error
    warnings.warn(f"A result of the search is left out: {one_line(str(error))}", stacklevel=3)


def _read(model: ModelInfo, hub: Hub) -> Found:
    """What the card says; settings from the configuration where the card is silent."""
    about = card(model)
    focus = _mapping(about.get("focus"))
    numbers = {name: kind(focus[name]) for name, kind in _NUMBERS.items() if is_number(focus.get(name))}
    bases = strings(about.get("base_model"))
    needed = {"num_groups", "local_window"} | (set() if focus.get("routing") == "cells" else {"top_k"})
    if not needed <= numbers.keys() and CONFIG_FILE in files(model):
        config = _tried(lambda: read_config(hub.fetch(model, CONFIG_FILE).parent), hub)
        if config is not None:  # an adapter that we cannot read is listed all the same
            numbers |= {"num_groups": config.num_groups, "local_window": config.local_window}
            numbers["top_k"] = None if config.by_cells else config.top_k
            bases = bases or strings(config.base_model_name_or_path)
    losses = _mapping(focus.get("losses")).items()
    return Found(
        model.id,
        next(iter(bases), None),
        **numbers,
        losses={text: loss for text, loss in losses if isinstance(text, str) and is_number(loss)},
        groups=strings(focus.get("groups")),
        downloads=model.downloads or 0,
        likes=model.likes or 0,
        updated=f"{model.last_modified:%Y-%m-%d}" if model.last_modified else "",
        license=about.license if isinstance(about.license, str) else None,
        datasets=strings(about.get("datasets")),
        private=bool(model.private),
        gated=bool(model.gated),
        commit=model.sha or "",
    )


def _mapping(value: Any) -> dict[Any, Any]:
    """A mapping from a card, which may say anything."""
    return value if isinstance(value, dict) else {}


def _groups(model: ModelInfo, hub: Hub) -> Iterator[str]:
    """What each group of an adapter is about, and where it is: ``"punctuation (layer 2, group 3)"``."""
    if GROUPS_FILE not in files(model):
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
