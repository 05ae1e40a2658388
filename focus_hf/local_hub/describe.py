"""What the Hub says about repositories, and lists of them with the filters, orders and pages of the Hub."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from dulwich.objects import Commit
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import hub, target, visitor
from .http import Gone, HubAnswer
from .repository import Repository

PAGE = 1000

SORTS = ("createdAt", "downloads", "lastModified", "likes", "trendingScore")


def iso(timestamp: float) -> str:
    """A time as the Hub writes it."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def commit_row(commit: Commit) -> dict[str, Any]:
    """A commit as the Hub writes it."""
    title, _, message = commit.message.decode("utf-8", "replace").partition("\n")
    author = commit.author.decode("utf-8", "replace").partition(" <")[0]
    return {
        "id": commit.id.decode(),
        "title": title,
        "message": message.strip(),
        "date": iso(commit.commit_time),
        "authors": [{"user": author}],
    }


def _tags(card: dict[str, Any]) -> list[str]:
    """Tags that the Hub derives from card metadata, in its spelling (``base_model:adapter:org/base``)."""
    tags = []
    for field, prefix in (
        ("library_name", ""),
        ("tags", ""),
        ("license", "license:"),
        ("datasets", "dataset:"),
        ("language", ""),
    ):
        tags += [f"{prefix}{value}" for value in _texts(card.get(field))]
    relation = card.get("base_model_relation")
    for base in _texts(card.get("base_model")):
        tags += [f"base_model:{base}", *([f"base_model:{relation}:{base}"] if relation else [])]
    return list(dict.fromkeys([*tags, *_texts(card.get("pipeline_tag"))]))


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def describe(repository: Repository, commit: str, *, blobs: bool = False) -> dict[str, Any]:
    """Everything that ``GET /api/models/{id}`` may answer."""
    meta, card = repository.meta(), repository.card(commit)
    return {
        "_id": repository.id,
        "id": repository.id,
        "modelId": repository.id,
        "author": repository.id.split("/")[0],
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
        "tags": _tags(card),
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card,
        "siblings": [
            {"rfilename": entry.path, **(entry.facts() if blobs else {})}
            for entry in repository.files(commit).values()
        ],
    }


def info(request: Request) -> Response:
    found = target(request).repository
    commit = found.resolve(request.path_params.get("revision", "main"))
    return JSONResponse(describe(found, commit, blobs="blobs" in request.query_params))


def visible(request: Request, kind: str) -> list[dict[str, Any]]:
    """The repositories that the visitor may see, by name; one that is deleted meanwhile is not among them."""
    here, user, rows = hub(request), visitor(request), []
    for repo_id in here.names(kind):
        with suppress(Gone):
            found = here.find(kind, repo_id)
            if here.owns(user, repo_id) or not found.meta()["private"]:
                rows.append({**describe(found, found.resolve("main")), "path": found.path})
    return rows


def list_repos(request: Request) -> Response:
    """One page of rows, and the address of the next page if there is one."""
    query = request.query_params
    key = query.get("sort", "trendingScore")
    if key not in SORTS:
        raise HubAnswer(400, f"sort must be one of {', '.join(SORTS)}, not {key!r}")
    start, limit = _number(query, "cursor", 0), min(_number(query, "limit", PAGE), PAGE)
    rows = [row for row in visible(request, request.path_params["kind"]) if _matches(row, query)]
    rows.sort(key=lambda row: row[key], reverse=query.get("direction", "-1") != "1")
    headers = {}
    if start + limit < len(rows) and limit:
        items = [(k, v) for k, v in query.multi_items() if k != "cursor"] + [("cursor", str(start + limit))]
        headers["Link"] = f'<{request.url.replace(query="")}?{urlencode(items)}>; rel="next"'
    return JSONResponse(rows[start : start + limit], headers=headers)


def _number(query: QueryParams, name: str, default: int) -> int:
    value = query.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise HubAnswer(400, f"{name} must be a number, not {value!r}")
    return int(value)


def _matches(row: dict[str, Any], query: QueryParams) -> bool:
    wanted = {*query.getlist("filter"), *query.getlist("library"), *query.getlist("tags")}
    gated = query.get("gated")
    return (
        query.get("author", row["author"]) == row["author"]
        and query.get("search", "").lower() in row["id"].lower()
        and (not gated or (gated.lower() in ("1", "true")) == bool(row["gated"]))
        and wanted <= set(row["tags"])
        and query.get("pipeline_tag", row["pipeline_tag"]) == row["pipeline_tag"]
    )
