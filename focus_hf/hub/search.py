"""Find Focus adapters on the Hub: by base model, by settings, by what their groups mean."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, AdapterFileError, read_config
from ..records.group_report import GroupReport
from .errors import hub_errors

#: Orders, best first.
SORTS = ("downloads", "likes", "date", "perplexity")

#: What people call parts of speech (Universal Dependencies), and the other way round.
_NAMES = {
    "ADJ": "adjective", "ADP": "preposition", "ADV": "adverb", "AUX": "auxiliary", "CCONJ": "conjunction",
    "DET": "determiner", "INTJ": "interjection", "NOUN": "noun", "NUM": "number", "PART": "particle",
    "PRON": "pronoun", "PROPN": "name", "PUNCT": "punctuation", "SCONJ": "conjunction", "SYM": "symbol",
    "VERB": "verb", "digits": "number",
}  # fmt: skip

#: A group report larger than this is not read for a search.
_LARGEST_REPORT = 8_000_000


@dataclass
class Found:
    """One adapter.

    Args:
        repo_id: ``"org/name"``.
        base_model: Hub id.
        num_groups, top_k, local_window: of the adapter; ``None`` where its card does not say.
        perplexity_change: against dense attention, in per cent, as the card says.
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
    perplexity_change: float | None = None
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
    domain: str | None = None,
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

    Args:
        base_model: Hub id of the base model.
        text: part of the repository's name.
        domain: part of a tag, of a data set's name or of the repository's name.
        tags: all of them must be there.
        author: user or organisation.
        num_groups, top_k: of the adapter.
        group: only adapters with a group about this: ``"punctuation"``, ``"verb"``, ``"PROPN"``.
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
    filters = ["focus", *tags, *([f"base_model:adapter:{base_model}"] if base_model else [])]
    order: Any = {"likes": "likes", "date": "last_modified"}.get(sort, "downloads")
    found: list[Found] = []
    with hub_errors(base_model or "The search", api.endpoint):
        listed = api.list_models(filter=filters, author=author, search=text, sort=order, full=True, cardData=True)
        for info in listed:
            adapter = _read(info, api)
            wanted = all(
                value is None or value == getattr(adapter, name)
                for name, value in (("num_groups", num_groups), ("top_k", top_k))
            )
            if not wanted or (domain and not _about(info, adapter, domain)):
                continue
            if group is not None:
                adapter.groups = [where for where in _groups(info, api) if _matches(where, group)]
                if not adapter.groups:
                    continue
            found.append(adapter)
            if len(found) == limit and sort != "perplexity":
                break
    if sort == "perplexity":
        found.sort(key=lambda adapter: (adapter.perplexity_change is None, adapter.perplexity_change))
    return found[:limit]


def _read(info: ModelInfo, api: HfApi) -> Found:
    """What the card says; settings from the configuration where the card is silent."""
    card = info.card_data.to_dict() if info.card_data else {}
    said = card.get("focus")
    focus: dict[str, Any] = said if isinstance(said, dict) else {}
    values = {name: _number(focus.get(name), int) for name in ("num_groups", "top_k", "local_window")}
    base = card.get("base_model")
    if None in values.values() and any(file.rfilename == CONFIG_FILE for file in info.siblings or []):
        try:
            config = read_config(Path(_download(api, info, CONFIG_FILE)).parent)
            values = {name: getattr(config, name) for name in values}
            base = base or config.base_model_name_or_path
        except (AdapterFileError, EntryNotFoundError, RepositoryNotFoundError):
            pass  # gated, or not an adapter that we can read: listed all the same
    updated = info.last_modified
    return Found(
        info.id,
        base[0] if isinstance(base, list) and base else base if isinstance(base, str) else None,
        **values,
        perplexity_change=_number(focus.get("perplexity_change"), float),
        groups=_strings(focus.get("groups")),
        downloads=info.downloads or 0,
        likes=info.likes or 0,
        updated=updated.date().isoformat() if isinstance(updated, datetime.datetime) else "",
        license=card.get("license") if isinstance(card.get("license"), str) else None,
        datasets=_strings(card.get("datasets")),
        private=bool(info.private),
        gated=bool(info.gated),
        commit=str(info.sha or ""),
    )


def _strings(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _number(value: Any, kind: type) -> Any:
    """A number from a card, which may say anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return kind(value) if is_number and value == value else None


def _about(info: ModelInfo, adapter: Found, domain: str) -> bool:
    return any(domain.lower() in name.lower() for name in (info.id, *(info.tags or []), *adapter.datasets))


def _groups(info: ModelInfo, api: HfApi) -> Iterator[str]:
    """What each group of an adapter is about, and where it is: ``"PUNCT (layer 2, group 3)"``."""
    try:
        for path in api.get_paths_info(info.id, GROUPS_FILE, revision=info.sha):
            if getattr(path, "size", 0) <= _LARGEST_REPORT:
                report = GroupReport.from_json(_download(api, info, GROUPS_FILE))
                for number, layer in enumerate(report.layers):
                    where = f"layer {number}" if layer.head is None else layer.title
                    for place, group in enumerate(layer.groups):
                        if group.label not in ("mixed", "empty"):
                            yield f"{group.label} ({where}, group {place})"
    except (GatedRepoError, EntryNotFoundError, ValueError):
        return


def _matches(where: str, wanted: str) -> bool:
    label = where.partition(" (")[0]
    names = {label.lower(), _NAMES.get(label, label).lower()}
    return wanted.lower().rstrip("s") in {name.rstrip("s") for name in names}


def _download(api: HfApi, info: ModelInfo, name: str) -> str:
    return str(api.hf_hub_download(info.id, name, revision=info.sha))
