"""Requests about repositories as a whole: identity, creation, settings, information, listing, likes."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..front_matter import card_metadata
from .access import KINDS, Target, find, hub, kind_of, target, visitor, writable, writer
from .describe import describe, iso
from .errors import HubAnswer
from .listing import chosen, expanded, listing, rows_of, visible
from .requests import Body, text, with_body
from .weights import parameters


def whoami(request: Request) -> Response:
    user = visitor(request)
    if user is None:
        raise HubAnswer(401, "Invalid username or password.")
    token: dict[str, Any] = {"displayName": "local", "role": user.role}
    return JSONResponse(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name,
            "orgs": [{"type": "org", "id": o, "name": o, "fullname": o, "roleInOrg": "write"} for o in user.orgs],
            "auth": {"type": "access_token", "accessToken": token},
        }
    )


@with_body
def validate_yaml(request: Request, body: Body) -> Response:
    """Check a card's metadata before it is committed."""
    errors = []
    try:
        card_metadata(text(body, "content", " "))
    except ValueError as error:
        errors.append({"message": f"Invalid metadata in README.md: {error}"})
    return JSONResponse({"warnings": [], "errors": errors}, status_code=400 if errors else 200)


def _named(body: Body, default: str) -> tuple[str, str]:
    """Kind and id that a request to create or delete names."""
    kind = f"{text(body, 'type', 'model')}s"
    if kind not in KINDS:
        raise HubAnswer(400, f"Unknown repository type: {body.get('type')!r}")
    return kind, f"{text(body, 'organization', default)}/{text(body, 'name')}"


@with_body
def create_repo(request: Request, body: Body) -> Response:
    user, here = writer(request), hub(request)
    kind, repo_id = _named(body, user.name)
    here.storage.folder(kind, repo_id)  # refuses what cannot be a name
    if not here.owns(user, repo_id):
        namespace = repo_id.split("/")[0]
        raise HubAnswer(
            403, f'You don\'t have the rights to create a {kind.rstrip("s")} under the namespace "{namespace}".'
        )
    private = bool(body.get("private")) or body.get("visibility") == "private"
    url = f"{str(request.base_url).rstrip('/')}/{'' if kind == 'models' else kind + '/'}{repo_id}"
    try:
        here.storage.create(kind, repo_id, user.name, private=private)
    except HubAnswer as error:
        if error.status == 409:
            error.extra = {"url": url}
        raise
    return JSONResponse({"url": url, "name": repo_id, "id": repo_id})


@with_body
def delete_repo(request: Request, body: Body) -> Response:
    user = writer(request)
    kind, repo_id = _named(body, user.name)
    find(request, kind, repo_id, user).check_write()
    hub(request).storage.delete(kind, repo_id)
    return JSONResponse({})


@with_body
def settings(request: Request, body: Body) -> Response:
    """Who may see a repository, and who may have its files."""
    found, _ = writable(request)
    changes: dict[str, Any] = {}
    if body.get("visibility") is not None or body.get("private") is not None:
        changes["private"] = body.get("visibility") == "private" or bool(body.get("private"))
    if body.get("gated") is not None:
        if body["gated"] not in ("auto", "manual", False):
            raise HubAnswer(400, f'gated must be "auto", "manual" or false, not {body["gated"]!r}')
        changes["gated"] = body["gated"]
    with found.repository.changing() as meta:
        meta.update(changes)
    return JSONResponse({"private": meta["private"], "gated": meta["gated"]})


def info(request: Request) -> Response:
    found, query = target(request), request.query_params
    commit = found.repository.resolve(request.path_params.get("revision", "main"))
    row = describe(found.repo_id, found.repository, commit, blobs="blobs" in query)
    if found.kind == "models" and (not expanded(query) or "safetensors" in expanded(query)):
        counted = parameters(hub(request).storage.lfs, found.repository, commit)
        row |= {"safetensors": counted} if counted else {}
    return JSONResponse(chosen(row, query, brief=False))


def list_repos(request: Request) -> Response:
    rows, following = listing(request, kind_of(request))
    return JSONResponse(rows, headers={"Link": f'<{following}>; rel="next"'} if following else None)


def auth_check(request: Request) -> Response:
    """Whether the visitor may have the files, or with ``write`` change them."""
    if request.path_params.get("write"):
        writable(request)
    else:
        target(request).check_files()
    return JSONResponse({})


# -- likes ---------------------------------------------------------------------------------------------------------


@with_body
def like(request: Request, body: Body) -> Response:
    """Like a repository, or with DELETE no longer."""
    user, found = writer(request), target(request)
    with found.repository.changing() as meta:
        likes = {name: when for name, when in meta["likes"].items() if name != user.name}
        if request.method == "POST":
            likes[user.name] = meta["likes"].get(user.name, time.time())
        meta["likes"] = likes
    return JSONResponse({})


def likers(request: Request) -> Response:
    names = target(request).repository.meta()["likes"]
    return JSONResponse([{"user": name, "fullname": name, "avatarUrl": ""} for name in names])


def liked(request: Request) -> Response:
    """What a user likes, as far as the visitor may see it."""
    name, rows = request.path_params["user"], list[dict[str, Any]]()
    for kind in KINDS:
        rows += rows_of(visible(hub(request), kind, visitor(request)), lambda found: _like_of(found, name))
    return JSONResponse(rows)


def _like_of(found: Target, name: str) -> dict[str, Any] | None:
    when = found.repository.meta()["likes"].get(name)
    repo = {"name": found.repo_id, "type": found.kind.rstrip("s")}
    return None if when is None else {"createdAt": iso(when), "repo": repo}
