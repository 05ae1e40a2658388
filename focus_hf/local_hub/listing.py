"""Listing repositories with the filters, orders and pages of the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request

from .access import Hub, Target, hub, visitor
from .describe import card_data, describe, tags_of
from .errors import HubAnswer
from .locks import Gone
from .users import User
from .weights import parameters

PAGE = 1000

#: Fields that a listing has, the ones that ``full=True`` adds, and those that are only there on request.
BRIEF = {"_id", "id", "modelId", "private", "downloads", "likes", "trendingScore", "createdAt", "tags"}
BRIEF |= {"library_name", "pipeline_tag"}
FULL = {"author", "sha", "lastModified", "gated", "disabled", "siblings"}

SORTS = ("createdAt", "downloads", "lastModified", "likes", "trendingScore")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def visible(here: Hub, kind: str, user: User | None) -> Iterator[Target]:
    """The repositories that a user may see, by name; one that is deleted meanwhile is not among them."""
    for repo_id in here.storage.list(kind):
        found = here.storage.find(kind, repo_id)
        owned = here.owns(user, repo_id)
        with suppress(Gone):
            if found is not None and (owned or not found.meta()["private"]):
                yield Target(kind, repo_id, found, user, owned)


def rows_of(targets: Iterable[Target], row: Callable[[Target], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """A row for each repository, unless it is ``None`` or the repository is deleted meanwhile."""
    rows = []
    for one in targets:
        with suppress(Gone):
            rows.append(row(one))
    return [known for known in rows if known is not None]


def listing(request: Request, kind: str) -> tuple[list[dict[str, Any]], str | None]:
    """One page of rows, and the address of the next page if there is one."""
    query, here = request.query_params, hub(request)
    found = visible(here, kind, visitor(request))
    rows = rows_of(found, lambda one: _row(here, one) if _matches(here, one, query) else None)
    key = query.get("sort", "trendingScore")
    if key not in SORTS:
        raise HubAnswer(400, f"sort must be one of {', '.join(SORTS)}, not {key!r}")
    rows.sort(key=lambda row: row["id"])
    rows.sort(key=lambda row: row[key], reverse=query.get("direction", "-1") != "1")

    start, limit = _number(query, "cursor", 0), min(_number(query, "limit", PAGE), PAGE)
    following = None
    if start + limit < len(rows) and limit:
        items = [(k, v) for k, v in query.multi_items() if k != "cursor"] + [("cursor", str(start + limit))]
        following = f"{request.url.replace(query='')}?{urlencode(items)}"
    shown = [chosen(row, query, brief=True) for row in rows[start : start + limit]]
    return [with_weights(here, kind, row, query) for row in shown], following


def _number(query: QueryParams, name: str, default: int) -> int:
    value = query.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise HubAnswer(400, f"{name} must be a number, not {value!r}")
    return int(value)


def _row(here: Hub, found: Target) -> dict[str, Any]:
    return describe(found.repo_id, found.repository, found.repository.resolve("main"))


def expanded(query: QueryParams) -> set[str]:
    return {*query.getlist("expand"), *query.getlist("expand[]")}


def chosen(row: dict[str, Any], query: QueryParams, *, brief: bool) -> dict[str, Any]:
    """The fields that a request asked for."""
    if wanted := expanded(query):
        return {name: row[name] for name in row if name in ("_id", "id") or name in wanted}
    if not brief:
        return row
    names = BRIEF | (FULL if _is_true(query, "full") else set())
    if _is_true(query, "cardData"):
        names.add("cardData")
    return {name: row[name] for name in row if name in names}


def with_weights(here: Hub, kind: str, row: dict[str, Any], query: QueryParams) -> dict[str, Any]:
    """The same row, with the parameter counts if a listing asks for them."""
    found = here.storage.find(kind, row["id"]) if "safetensors" in expanded(query) else None
    counted = parameters(here.storage.lfs, found, found.resolve("main")) if found else None
    return {**row, "safetensors": counted} if counted else row


def _matches(here: Hub, found: Target, query: QueryParams) -> bool:
    author, name = found.repo_id.split("/")
    if query.get("author", author) != author:
        return False
    if query.get("search", "").lower() not in found.repo_id.lower():
        return False
    if any(query.get(name) for name in ("apps", "inference", "inference_provider")):
        return False  # nothing is served from here
    meta = found.repository.meta()
    if query.get("gated") and _is_true(query, "gated") != bool(meta["gated"]):
        return False
    commit = found.repository.resolve("main")
    card = card_data(found.repository, commit)
    wanted = {*query.getlist("filter"), *query.getlist("library"), *query.getlist("tags")}
    if not wanted <= set(tags_of(card)):
        return False
    if query.get("pipeline_tag", card.get("pipeline_tag")) != card.get("pipeline_tag"):
        return False
    if query.get("num_parameters"):
        counted = parameters(here.storage.lfs, found.repository, commit)
        low, high = _bounds(query["num_parameters"])
        return counted is not None and low <= counted["total"] <= high
    return True


def _is_true(query: QueryParams, name: str) -> bool:
    return query.get(name, "").lower() in ("1", "true")


def _bounds(text: str) -> tuple[float, float]:
    """Least and most of ``min:6B,max:128B``."""
    bounds = {"min": 0.0, "max": float("inf")}
    for part in text.split(","):
        match = re.fullmatch(r"(min|max):([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?)", part.strip())
        if match is None:
            raise HubAnswer(400, f"num_parameters is like min:6B,max:128B, not {text!r}")
        bounds[match[1]] = float(match[2]) * _UNITS[match[3]]
    return bounds["min"], bounds["max"]
