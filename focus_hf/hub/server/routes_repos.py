"""Requests about repositories as a whole: identity, creation, information, listing, references."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import KINDS, hub, repository, user, writer
from .describe import card_data, describe, file_facts, front_matter, iso, tags_of
from .errors import HubAnswer

PAGE = 1000


async def whoami(request: Request) -> Response:
    name = user(request)
    if name is None:
        raise HubAnswer(401, "Invalid username or password.")
    return JSONResponse(
        {
            "type": "user",
            "name": name,
            "fullname": name,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "local", "role": "write"}},
        }
    )


async def validate_yaml(request: Request) -> Response:
    """Check a card's metadata before it is committed."""
    content = (await request.json()).get("content", "")
    errors = []
    try:
        front_matter(content)
    except (yaml.YAMLError, ValueError) as error:
        errors.append({"message": f"Invalid metadata in README.md: {error}"})
    return JSONResponse({"warnings": [], "errors": errors}, status_code=400 if errors else 200)


async def create_repo(request: Request) -> Response:
    author, body = writer(request), await request.json()
    kind = f"{body.get('type') or 'model'}s"
    if kind not in KINDS:
        raise HubAnswer(400, f"Unknown repository type: {body.get('type')!r}")
    repo_id = f"{body.get('organization') or author}/{body.get('name', '')}"
    private = bool(body.get("private")) or body.get("visibility") == "private"
    url = f"{str(request.base_url).rstrip('/')}/{'' if kind == 'models' else kind + '/'}{repo_id}"
    try:
        hub(request).storage.create(kind, repo_id, private)
    except HubAnswer as error:
        if error.status == 409:
            error.extra = {"url": url}
        raise
    return JSONResponse({"url": url, "name": repo_id, "id": repo_id})


async def delete_repo(request: Request) -> Response:
    author, body = writer(request), await request.json()
    repo_id = f"{body.get('organization') or author}/{body.get('name', '')}"
    hub(request).storage.delete(f"{body.get('type') or 'model'}s", repo_id)
    return JSONResponse({})


async def settings(request: Request) -> Response:
    writer(request)
    kind, repo_id, _ = repository(request)
    body = await request.json()
    private = body.get("private", body.get("visibility") == "private")
    hub(request).storage.update_meta(kind, repo_id, private=bool(private))
    return JSONResponse({"private": bool(private)})


def info(request: Request) -> Response:
    kind, repo_id, found = repository(request)
    commit = found.resolve(request.path_params.get("revision", "main"))
    blobs = "blobs" in request.query_params or "blobs" in request.query_params.getlist("expand")
    return JSONResponse(describe(hub(request), kind, repo_id, found, commit, blobs=blobs))


def list_repos(request: Request) -> Response:
    """Listing with the Hub's filters: every tag given must be there; newest, or most downloaded, first."""
    kind, query = request.path_params["kind"], request.query_params
    if kind not in KINDS:
        raise HubAnswer(404, "Not found")
    storage, wanted = hub(request).storage, query.getlist("filter")
    rows: list[dict[str, Any]] = []
    for repo_id in storage.list(kind):
        if query.get("author", repo_id.split("/")[0]) != repo_id.split("/")[0]:
            continue
        if query.get("search", "").lower() not in repo_id.lower():
            continue
        if storage.meta(kind, repo_id)["private"] and user(request) is None:
            continue
        found = storage.get(kind, repo_id)
        commit = found.resolve("main")
        if not set(wanted) <= set(tags_of(card_data(found, commit))):
            continue
        rows.append(describe(hub(request), kind, repo_id, found, commit, blobs=False))
    key = query.get("sort", "trendingScore")
    rows.sort(key=lambda row: row["id"])
    rows.sort(key=lambda row: row.get(key) or 0 if key != "lastModified" else row[key], reverse=True)

    start, limit = int(query.get("cursor", 0)), min(int(query.get("limit", PAGE)), PAGE)
    headers = {}
    if start + limit < len(rows):
        following = [(k, v) for k, v in query.multi_items() if k != "cursor"] + [("cursor", str(start + limit))]
        headers["Link"] = f'<{request.url.replace(query="")}?{urlencode(following)}>; rel="next"'
    return JSONResponse(rows[start : start + limit], headers=headers)


def tree(request: Request) -> Response:
    _, _, found = repository(request)
    commit = found.resolve(request.path_params["revision"])
    prefix = request.path_params.get("path", "").strip("/")
    recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
    head = next(found.history(commit))
    last = {"id": commit, "title": head.message.decode().splitlines()[0], "date": iso(head.commit_time)}
    rows: dict[str, dict[str, Any]] = {}
    for path, entry in found.files(commit).items():
        if prefix and not path.startswith(prefix + "/"):
            continue
        parts = path[len(prefix) + 1 if prefix else 0 :].split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(filter(None, [prefix, *parts[:depth]]))
            rows.setdefault(folder, {"type": "directory", "path": folder, "oid": commit, "size": 0})
            if not recursive:
                break
        if len(parts) == 1 or recursive:
            rows[path] = {"type": "file", "path": path, **file_facts(entry), "lastCommit": last}
    if prefix and not rows:
        raise HubAnswer(404, f"{prefix} does not exist on {request.path_params['revision']}", code="EntryNotFound")
    return JSONResponse(sorted(rows.values(), key=lambda row: row["path"]))


async def paths_info(request: Request) -> Response:
    _, _, found = repository(request)
    files = found.files(found.resolve(request.path_params["revision"]))
    if request.headers.get("content-type", "").startswith("application/json"):
        paths = (await request.json()).get("paths", [])
    else:
        paths = parse_qs((await request.body()).decode()).get("paths", [])
    rows = []
    for path in [paths] if isinstance(paths, str) else paths:
        if path in files:
            rows.append({"type": "file", "path": path, **file_facts(files[path])})
        elif any(name.startswith(path.rstrip("/") + "/") for name in files):
            rows.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
    return JSONResponse(rows)


def commits(request: Request) -> Response:
    _, _, found = repository(request)
    rows = []
    for commit in found.history(found.resolve(request.path_params["revision"])):
        title, _, message = commit.message.decode().partition("\n\n")
        rows.append(
            {
                "id": commit.id.decode(),
                "title": title,
                "message": message,
                "date": iso(commit.commit_time),
                "authors": [{"user": "demo"}],
            }
        )
    return JSONResponse(rows)


def refs(request: Request) -> Response:
    _, _, found = repository(request)
    answer: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": []}
    kinds = {"refs/heads/": "branches", "refs/tags/": "tags"}
    if request.query_params.get("include_prs"):
        kinds["refs/pr/"] = "pullRequests"
        answer["pullRequests"] = []
    for ref, commit in sorted(found.refs().items()):
        for prefix, group in kinds.items():
            if ref.startswith(prefix):
                name = ref if group == "pullRequests" else ref.removeprefix(prefix)
                answer[group].append({"name": name, "ref": ref, "targetCommit": commit})
    return JSONResponse(answer)


async def branch(request: Request) -> Response:
    writer(request)
    _, _, found = repository(request)
    name = request.path_params["ref"]
    if name.startswith("refs/"):
        raise HubAnswer(400, f"Invalid reference for a branch: {name}")
    if request.method == "DELETE":
        found.delete_ref(f"refs/heads/{name}")
    else:
        body = await request.json() if await request.body() else {}
        found.set_ref(f"refs/heads/{name}", found.resolve(body.get("startingPoint") or "main"))
    return JSONResponse({})


async def tag(request: Request) -> Response:
    writer(request)
    _, _, found = repository(request)
    if request.method == "DELETE":
        found.delete_ref(f"refs/tags/{request.path_params['ref']}")
    else:
        name = (await request.json())["tag"]
        found.set_ref(f"refs/tags/{name}", found.resolve(request.path_params["ref"]))
    return JSONResponse({})
