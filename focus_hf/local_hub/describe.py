"""What the Hub says about a repository: tags and card data from its README, files, dates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..front_matter import card_metadata
from .changes import Entry
from .repository import Repository


def iso(timestamp: float) -> str:
    """A time as the Hub writes it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def card_data(repository: Repository, commit: str) -> dict[str, Any]:
    """Metadata of the README of a commit; empty if there is none or it cannot be read."""
    readme = repository.files(commit).get("README.md")
    if readme is None or readme.lfs is not None:
        return {}
    return repository.remembered(("card", readme.blob_id), lambda: _card_data(repository, readme))


def _card_data(repository: Repository, readme: Entry) -> dict[str, Any]:
    try:
        return card_metadata(repository.read(readme).decode("utf-8", "replace"))
    except ValueError:
        return {}


def tags_of(card: dict[str, Any]) -> list[str]:
    """Tags that the Hub derives from card metadata, in its spelling (``base_model:adapter:org/base``)."""
    tags = [card["library_name"]] if isinstance(card.get("library_name"), str) else []
    tags += _strings(card.get("tags"))
    for field, prefix in (("license", "license:"), ("datasets", "dataset:"), ("language", "")):
        tags += [f"{prefix}{value}" for value in _strings(card.get(field))]
    relation = card.get("base_model_relation")
    for base in _strings(card.get("base_model")):
        tags.append(f"base_model:{base}")
        if relation:
            tags.append(f"base_model:{relation}:{base}")
    if isinstance(card.get("pipeline_tag"), str):
        tags.append(card["pipeline_tag"])
    return list(dict.fromkeys(tags))


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str)]


def describe(repo_id: str, repository: Repository, commit: str, *, blobs: bool = False) -> dict[str, Any]:
    """Everything that ``GET /api/models/{id}`` may answer."""
    meta, card = repository.meta(), card_data(repository, commit)
    return {
        "_id": repo_id,
        "id": repo_id,
        "modelId": repo_id,
        "author": repo_id.split("/")[0],
        "sha": commit,
        "private": meta["private"],
        "gated": meta["gated"],
        "disabled": False,
        "downloads": meta["downloads"],
        "downloadsAllTime": meta["downloads"],
        "likes": 0,
        "trendingScore": meta["downloads"],
        "createdAt": iso(meta["created"]),
        "lastModified": iso(repository.describe_commit(commit).commit_time),
        "tags": tags_of(card),
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card,
        "siblings": [_sibling(entry, blobs) for entry in repository.files(commit).values()],
    }


def _sibling(entry: Entry, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": entry.path}
    return {"rfilename": entry.path, **file_facts(entry)}


def file_facts(entry: Entry) -> dict[str, Any]:
    """Size and hashes of a file, in the names of the Hub's JSON."""
    facts: dict[str, Any] = {"size": entry.size, "blobId": entry.blob_id, "oid": entry.blob_id}
    if entry.lfs is not None:
        facts["lfs"] = {"oid": entry.lfs, "sha256": entry.lfs, "size": entry.size, "pointerSize": 134}
    return facts
