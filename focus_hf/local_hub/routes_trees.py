"""Requests about what is in a repository: files, commits, branches and tags."""

from __future__ import annotations

from typing import Any

from dulwich.objects import Commit
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import target, writable
from .changes import folders_of
from .describe import file_facts, iso
from .errors import HubAnswer
from .requests import Body, check_count, text, with_body


def tree(request: Request) -> Response:
    found = target(request).repository
    commit = found.resolve(request.path_params["revision"])
    prefix = request.path_params.get("path", "").strip("/")
    recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
    head = found.describe_commit(commit)
    last = {"id": commit, "title": title_of(head), "date": iso(head.commit_time)}
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


@with_body
def paths_info(request: Request, body: Body) -> Response:
    found = target(request).repository
    commit = found.resolve(request.path_params["revision"])
    files = found.files(commit)
    folders = found.remembered(("folders", commit), lambda: folders_of(files))
    wanted, rows = body.get("paths", []), []
    wanted = wanted if isinstance(wanted, list) else [wanted]
    check_count(wanted)
    for path in wanted:
        if not isinstance(path, str):
            raise HubAnswer(400, "paths must be a list of texts")
        if path in files:
            rows.append({"type": "file", "path": path, **file_facts(files[path])})
        elif path.rstrip("/") in folders:
            rows.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
    return JSONResponse(rows)


def title_of(commit: Commit) -> str:
    return commit.message.decode("utf-8", "replace").partition("\n")[0]


def author_of(commit: Commit) -> str:
    return commit.author.decode("utf-8", "replace").partition(" <")[0]


def commits(request: Request) -> Response:
    found = target(request).repository
    rows = []
    for commit in found.history(found.resolve(request.path_params["revision"])):
        title, _, message = commit.message.decode("utf-8", "replace").partition("\n\n")
        rows.append(
            {
                "id": commit.id.decode(),
                "title": title,
                "message": message,
                "date": iso(commit.commit_time),
                "authors": [{"user": author_of(commit)}],
            }
        )
    return JSONResponse(rows)


def refs(request: Request) -> Response:
    found = target(request).repository
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


@with_body
def branch(request: Request, body: Body) -> Response:
    found, name = writable(request)[0].repository, request.path_params["ref"]
    if request.method == "DELETE":
        found.delete_ref(f"refs/heads/{name}")
    else:
        found.add_ref(f"refs/heads/{name}", found.resolve(text(body, "startingPoint", "main")))
    return JSONResponse({})


@with_body
def tag(request: Request, body: Body) -> Response:
    found = writable(request)[0].repository
    if request.method == "DELETE":
        found.delete_ref(f"refs/tags/{request.path_params['ref']}")
    else:
        found.add_ref(f"refs/tags/{text(body, 'tag')}", found.resolve(request.path_params["ref"]))
    return JSONResponse({})
