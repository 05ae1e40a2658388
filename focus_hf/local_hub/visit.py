"""One request: who asks, for what, and what came with it.

Private repositories do not exist for others: they get the answer that they would get for a name nobody has taken.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .http import Body, Gone, HubAnswer, receive
from .hub import Hub, User
from .repository import Repository

#: Bytes of a JSON body. The longest that a client sends holds a whole card, to have its metadata checked.
MAX_JSON = 8 * 1024 * 1024

#: Fields of a form; no request has more than a handful.
_MAX_FIELDS = 100


class Visit:
    """A request with the fields of its body; what it names is looked up when it is asked for."""

    def __init__(self, request: Request, body: Body | None = None) -> None:
        self.request, self.query, self.named = request, request.query_params, request.path_params
        self.body = body or {}
        self.hub: Hub = request.app.state.hub
        self.base = str(request.base_url).rstrip("/")

    @cached_property
    def user(self) -> User | None:
        """Whose token it carries, if any.

        Raises:
            HubAnswer: 401 for a token that is not known.
        """
        scheme, _, token = self.request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        if token not in self.hub.users:
            raise HubAnswer(401, "Invalid credentials in Authorization header")
        return self.hub.users[token]

    def sender(self, role: str = "write") -> User:
        """The user, where a token is required, by default one that may write."""
        if self.user is None:
            raise HubAnswer(401, "Invalid username or password.")
        if role == "write" and self.user.role != role:
            raise HubAnswer(403, "Forbidden: you must use a write token to upload to a repository.")
        return self.user

    def owns(self, repo_id: str) -> bool:
        """Whether the user's own tokens may read and write everything in a repository."""
        return self.user is not None and (self.user.everywhere or repo_id.split("/")[0] == self.user.name)

    def find(self, kind: str, repo_id: str) -> Repository:
        """A repository, if the visitor may see it."""
        owned = self.owns(repo_id)
        try:
            found = self.hub.find(kind, repo_id)
            if owned or not found.meta()["private"]:
                return found
        except HubAnswer:  # there is none, or none can have this name
            pass
        if self.user is None:
            raise HubAnswer(401, "Invalid username or password.", code="RepoNotFound")
        raise Gone

    @cached_property
    def repository(self) -> Repository:
        """The one that the URL names; pages and downloads of models name no kind."""
        return self.find(self.named.get("kind", "models"), f"{self.named['namespace']}/{self.named['name']}")

    @cached_property
    def commit(self) -> str:
        """Of the revision that the URL names."""
        return self.repository.resolve(self.named.get("revision", "main"))

    @property
    def path(self) -> str:
        """Of a file or folder of the repository; empty for all of it."""
        return self.named.get("path", "").strip("/")

    def writable(self, refusal: str | None = None) -> Repository:
        """The repository, if the user may write to it with this token; else ``refusal`` may say what to do."""
        self.sender()
        if not self.owns(self.repository.id):
            raise HubAnswer(403, refusal or f"Forbidden: you don't have write access to {self.repository.id}.")
        return self.repository

    def refusal(self) -> HubAnswer | None:
        """Why the visitor cannot have the files of a gated repository, if so."""
        found, meta = self.repository, self.repository.meta()
        if not meta["gated"] or self.owns(found.id):
            return None
        subject = f"Access to {found.type} {found.id} is restricted"
        if self.user is None:
            message = f"{subject}. You must have access to it and be authenticated to access it. Please log in."
            return HubAnswer(401, message, code="GatedRepo")
        if self.user.name in meta["access"]:
            return None
        return HubAnswer(403, f"{subject} and you are not in the authorized list. Ask its authors.", code="GatedRepo")


def answering(handler: Callable[[Visit], Any]) -> Callable[[Request], Awaitable[Response]]:
    """A handler of visits as one of requests; it runs in a thread, where it may wait, and its answer may be JSON, or
    nothing where there is nothing to say."""

    def answer(request: Request, raw: bytes) -> Response:
        found = handler(Visit(request, _fields(request, raw)))
        return found if isinstance(found, Response) else JSONResponse({} if found is None else found)

    async def handle(request: Request) -> Response:
        raw = bytearray()
        await receive(request, raw.extend, MAX_JSON, HubAnswer(413, f"The request has more than {MAX_JSON:,} bytes"))
        return await run_in_threadpool(answer, request, bytes(raw))

    return handle


def _fields(request: Request, raw: bytes) -> Body:
    try:
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return parse_qs(raw.decode("utf-8", "replace"), max_num_fields=_MAX_FIELDS)
        body = None if request.method in ("GET", "HEAD") else json.loads(raw or b"null")
    except (ValueError, RecursionError):
        raise HubAnswer(400, "The request is not valid JSON") from None
    if not isinstance(body, dict | None):
        raise HubAnswer(400, "The request must be a JSON object")
    return body or {}
