"""Requests about repositories as a whole: identity, creation, settings, access, information, listing."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..front_matter import card_metadata
from .access import KINDS, find, hub, kind_of, target, visitor, writable, writer
from .describe import describe
from .errors import HubAnswer
from .listing import listing
from .requests import Body, text, with_body


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
            "orgs": [],
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


@with_body
def grant_access(request: Request, body: Body) -> Response:
    """Let somebody have the files of a gated repository; there is no asking for it here."""
    found, name = writable(request)[0], text(body, "user")
    with found.repository.changing() as meta:
        if not meta["gated"]:
            raise HubAnswer(400, f"{found.repo_id} is not gated")
        if name in meta["access"]:
            raise HubAnswer(400, f"{name} has access already")
        meta["access"] = [*meta["access"], name]
    return JSONResponse({})


def info(request: Request) -> Response:
    found, query = target(request), request.query_params
    commit = found.repository.resolve(request.path_params.get("revision", "main"))
    row = describe(found.repo_id, found.repository, commit, blobs="blobs" in query)
    return JSONResponse(row)


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
