"""Requests about access to gated repositories: ask, list, decide, grant."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import target, visitor, writable
from .describe import iso
from .errors import HubAnswer
from .requests import Body, text, with_body

STATUSES = ("pending", "accepted", "rejected")


@with_body
def ask_access(request: Request, body: Body) -> Response:
    """What a visitor's click on the repository's page does on the real Hub; here a POST, as there is no log-in."""
    user, found = visitor(request), target(request)
    if user is None:
        raise HubAnswer(401, "Invalid username or password.")
    with found.repository.changing() as meta:
        if not meta["gated"]:
            raise HubAnswer(400, f"{found.repo_id} is not gated")
        if user.name not in meta["access"]:
            status = "accepted" if meta["gated"] == "auto" else "pending"
            meta["access"] = {**meta["access"], user.name: _request(status)}
    return JSONResponse({"status": meta["access"][user.name]["status"]})


def _request(status: str) -> dict[str, str]:
    return {"id": secrets.token_hex(12), "status": status, "timestamp": iso(time.time())}


def access_requests(request: Request) -> Response:
    found, status = writable(request)[0], request.path_params["status"]
    if status not in STATUSES:
        raise HubAnswer(404, "Not found")
    rows = [
        {
            "requestId": entry["id"],
            "status": status,
            "timestamp": entry["timestamp"],
            "user": {"user": name, "fullname": name, "email": None},
        }
        for name, entry in found.repository.meta()["access"].items()
        if entry["status"] == status
    ]
    return JSONResponse(rows)


@with_body
def handle_access(request: Request, body: Body) -> Response:
    """Accept, reject or put back one request."""
    found, status = writable(request)[0], text(body, "status")
    if status not in STATUSES:
        raise HubAnswer(400, f"status must be one of {', '.join(STATUSES)}")
    with found.repository.changing() as meta:
        name = text(body, "user") if body.get("user") else None
        if name is None:
            name = next((n for n, entry in meta["access"].items() if entry["id"] == body.get("requestId")), None)
        if name not in meta["access"]:
            raise HubAnswer(404, "There is no such access request")
        if meta["access"][name]["status"] == status:
            raise HubAnswer(404, f"The access request is {status} already")
        meta["access"] = {**meta["access"], name: {**meta["access"][name], "status": status}}
    return JSONResponse({})


@with_body
def grant_access(request: Request, body: Body) -> Response:
    """Give access to somebody who did not ask."""
    found, name = writable(request)[0], text(body, "user")
    with found.repository.changing() as meta:
        if not meta["gated"]:
            raise HubAnswer(400, f"{found.repo_id} is not gated")
        if meta["access"].get(name, {}).get("status") == "accepted":
            raise HubAnswer(400, f"{name} has access already")
        meta["access"] = {**meta["access"], name: _request("accepted")}
    return JSONResponse({})
