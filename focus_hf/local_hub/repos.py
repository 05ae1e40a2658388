"""Requests about who one is, and about repositories as a whole: creation, settings, access."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..front_matter import card_metadata
from .access import find, hub, named_visitor, target, writable, writer
from .http import Body, HubAnswer, answer, text, with_body
from .repository import KINDS


def whoami(request: Request) -> Response:
    user = named_visitor(request)
    return JSONResponse(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "local", "role": user.role}},
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
    here.folder(kind, repo_id)  # refuses what cannot be a name
    if not here.owns(user, repo_id):
        message = f"You don't have the rights to create a {kind.removesuffix('s')} under the namespace"
        raise HubAnswer(403, f'{message} "{repo_id.split("/")[0]}".')
    private = bool(body.get("private")) or body.get("visibility") == "private"
    url = f"{str(request.base_url).rstrip('/')}/{'' if kind == 'models' else kind + '/'}{repo_id}"
    try:
        here.create(kind, repo_id, user.name, private=private)
    except HubAnswer as error:  # the name is taken: the client may be content with what is there
        return answer(request, error, url=url)
    return JSONResponse({"url": url, "name": repo_id, "id": repo_id})


@with_body
def delete_repo(request: Request, body: Body) -> Response:
    kind, repo_id = _named(body, writer(request).name)
    find(request, kind, repo_id).check_write()
    hub(request).delete(kind, repo_id)
    return JSONResponse({})


@with_body
def settings(request: Request, body: Body) -> Response:
    """Who may see a repository, and who may have its files."""
    found, changes = writable(request).repository, dict[str, Any]()
    if body.get("visibility") is not None or body.get("private") is not None:
        changes["private"] = body.get("visibility") == "private" or bool(body.get("private"))
    if body.get("gated") is not None:
        if body["gated"] not in ("auto", "manual", False):
            raise HubAnswer(400, f'gated must be "auto", "manual" or false, not {body["gated"]!r}')
        changes["gated"] = body["gated"]
    with found.changing() as meta:
        meta.update(changes)
    return JSONResponse({"private": meta["private"], "gated": meta["gated"]})


@with_body
def grant_access(request: Request, body: Body) -> Response:
    """Let somebody have the files of a gated repository; there is no asking for it here."""
    found, name = writable(request).repository, text(body, "user")
    with found.changing() as meta:
        if not meta["gated"]:
            raise HubAnswer(400, f"{found.id} is not gated")
        if name in meta["access"]:
            raise HubAnswer(400, f"{name} has access already")
        meta["access"] = [*meta["access"], name]
    return JSONResponse({})


def auth_check(request: Request) -> Response:
    """Whether the visitor may have the files, or with ``write`` change them."""
    if request.path_params.get("write"):
        writable(request)
    else:
        target(request).check_files()
    return JSONResponse({})
