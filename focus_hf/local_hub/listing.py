"""Listing repositories with the filters, orders and pages of the Hub."""

from __future__ import annotations

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

PAGE = 1000

SORTS = ("createdAt", "downloads", "lastModified", "likes", "trendingScore")


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
    rows = rows_of(found, lambda one: _row(one) if _matches(one, query) else None)
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
    return rows[start : start + limit], following


def _number(query: QueryParams, name: str, default: int) -> int:
    value = query.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise HubAnswer(400, f"{name} must be a number, not {value!r}")
    return int(value)


def _row(found: Target) -> dict[str, Any]:
    return describe(found.repo_id, found.repository, found.repository.resolve("main"))


def _matches(found: Target, query: QueryParams) -> bool:
    author, name = found.repo_id.split("/")
    if query.get("author", author) != author:
        return False
    if query.get("search", "").lower() not in found.repo_id.lower():
        return False
    if query.get("gated") and (query["gated"].lower() in ("1", "true")) != bool(found.repository.meta()["gated"]):
        return False
    card = card_data(found.repository, found.repository.resolve("main"))
    wanted = {*query.getlist("filter"), *query.getlist("library"), *query.getlist("tags")}
    if not wanted <= set(tags_of(card)):
        return False
    return query.get("pipeline_tag", card.get("pipeline_tag")) == card.get("pipeline_tag")
