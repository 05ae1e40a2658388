"""Repositories as a whole: what is said of them, lists with filters and pages, creation, settings, access."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from dulwich.objects import Commit
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response

from ..front_matter import card_metadata, strings
from .http import Body, Gone, HubAnswer, answer, text
from .repository import KINDS, Repository
from .visit import Visit

#: Rows of a page, at most.
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
            {"rfilename": path, **(entry.facts() if blobs else {})} for path, entry in repository.files(commit).items()
        ],
    }


def _tags(card: dict[str, Any]) -> list[str]:
    """Tags that the Hub derives from card metadata, in its spelling (``base_model:adapter:org/base``)."""
    tags = [*strings(card.get("library_name")), *strings(card.get("tags"))]
    tags += [f"license:{name}" for name in strings(card.get("license"))]
    tags += [f"dataset:{name}" for name in strings(card.get("datasets"))]
    tags += strings(card.get("language"))
    for base in strings(card.get("base_model")):
        tags.append(f"base_model:{base}")
        if card.get("base_model_relation"):
            tags.append(f"base_model:{card['base_model_relation']}:{base}")
    return list(dict.fromkeys([*tags, *strings(card.get("pipeline_tag"))]))


def visible(visit: Visit, kind: str) -> list[dict[str, Any]]:
    """The repositories that the visitor may see, by name; one that is deleted meanwhile is not among them."""
    rows = []
    for repo_id in visit.hub.names(kind):
        with suppress(Gone):
            found = visit.hub.find(kind, repo_id)
            if visit.owns(repo_id) or not found.meta()["private"]:
                rows.append({**describe(found, found.resolve("main")), "path": found.path})
    return rows


def info(visit: Visit) -> dict[str, Any]:
    return describe(visit.repository, visit.commit, blobs="blobs" in visit.query)


def list_repos(visit: Visit) -> Response:
    """One page of rows, and the address of the next page if there is one."""
    query, key = visit.query, visit.query.get("sort", "trendingScore")
    if key not in SORTS:
        raise HubAnswer(400, f"sort must be one of {', '.join(SORTS)}, not {key!r}")
    start, limit = _number(query, "cursor", 0), min(_number(query, "limit", PAGE), PAGE)
    rows = [row for row in visible(visit, visit.named["kind"]) if _matches(row, query)]
    rows.sort(key=lambda row: row[key], reverse=query.get("direction", "-1") != "1")
    headers = {}
    if start + limit < len(rows) and limit:
        items = [(k, v) for k, v in query.multi_items() if k != "cursor"] + [("cursor", str(start + limit))]
        headers["Link"] = f'<{visit.request.url.replace(query="")}?{urlencode(items)}>; rel="next"'
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


def whoami(visit: Visit) -> dict[str, Any]:
    user = visit.sender(role="read")
    token = {"displayName": "local", "role": user.role}
    auth = {"type": "access_token", "accessToken": token}
    return {"type": "user", "id": user.name, "name": user.name, "fullname": user.name, "orgs": [], "auth": auth}


def validate_yaml(visit: Visit) -> Response:
    """Check a card's metadata before it is committed."""
    errors = []
    try:
        card_metadata(text(visit.body, "content", " "))
    except ValueError as error:
        errors.append({"message": f"Invalid metadata in README.md: {error}"})
    return JSONResponse({"warnings": [], "errors": errors}, status_code=400 if errors else 200)


def _named(body: Body, default: str) -> tuple[str, str]:
    """Kind and id that a request to create or delete names."""
    kind = f"{text(body, 'type', 'model')}s"
    if kind not in KINDS:
        raise HubAnswer(400, f"Unknown repository type: {body.get('type')!r}")
    return kind, f"{text(body, 'organization', default)}/{text(body, 'name')}"


def _private(body: Body) -> bool:
    return bool(body.get("private")) or body.get("visibility") == "private"


def create_repo(visit: Visit) -> Any:
    user = visit.sender()
    kind, repo_id = _named(visit.body, user.name)
    visit.hub.folder(kind, repo_id)  # refuses what cannot be a name
    if not visit.owns(repo_id):
        message = f"You don't have the rights to create a {kind.removesuffix('s')} under the namespace"
        raise HubAnswer(403, f'{message} "{repo_id.split("/")[0]}".')
    url = f"{visit.base}/{'' if kind == 'models' else kind + '/'}{repo_id}"
    try:
        visit.hub.create(kind, repo_id, user.name, private=_private(visit.body))
    except HubAnswer as error:  # the name is taken: the client may be content with what is there
        return answer(visit.request, error, url=url)
    return {"url": url, "name": repo_id, "id": repo_id}


def delete_repo(visit: Visit) -> None:
    kind, repo_id = _named(visit.body, visit.sender().name)
    visit.repository = visit.find(kind, repo_id)
    visit.writable()
    visit.hub.delete(kind, repo_id)


def settings(visit: Visit) -> dict[str, Any]:
    """Who may see a repository, and who may have its files."""
    found, body, changes = visit.writable(), visit.body, dict[str, Any]()
    if body.get("visibility") is not None or body.get("private") is not None:
        changes["private"] = _private(body)
    if body.get("gated") is not None:
        if body["gated"] not in ("auto", "manual", False):
            raise HubAnswer(400, f'gated must be "auto", "manual" or false, not {body["gated"]!r}')
        changes["gated"] = body["gated"]
    with found.changing() as meta:
        meta.update(changes)
    return {"private": meta["private"], "gated": meta["gated"]}


def grant_access(visit: Visit) -> None:
    """Let somebody have the files of a gated repository; there is no asking for it here."""
    found, name = visit.writable(), text(visit.body, "user")
    with found.changing() as meta:
        if not meta["gated"]:
            raise HubAnswer(400, f"{found.id} is not gated")
        if name in meta["access"]:
            raise HubAnswer(400, f"{name} has access already")
        meta["access"] = [*meta["access"], name]


def auth_check(visit: Visit) -> None:
    """Whether the visitor may have the files, or with ``write`` change them."""
    if "write" in visit.named:
        visit.writable()
    elif refusal := visit.refusal():
        raise refusal
