"""What all requests share: what they pass first, how their bodies are read, and how errors are answered."""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Files that one request may name; clients send a few hundred at a time.
MAX_FILES = 25_000

#: Stands for an encoded slash while routes are matched.
ENCODED_SLASH = "\x1f"

_BLOCK = 1 << 20

Body = dict[str, Any]


# -- errors --------------------------------------------------------------------------------------------------------


class HubAnswer(Exception):
    """An error answer: HTTP status, what went wrong, and the code by which `huggingface_hub` chooses its exception."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Gone(HubAnswer):
    """There is no such repository, or it was deleted since the request found it."""

    def __init__(self) -> None:
        super().__init__(404, "Repository not found", code="RepoNotFound")


def no_revision(name: str) -> HubAnswer:
    return HubAnswer(404, f"Invalid rev id: {name}", code="RevisionNotFound")


def no_entry(path: str) -> HubAnswer:
    return HubAnswer(404, f"Entry not found: {path}", code="EntryNotFound")


def answer(request: Request, error: Exception, **fields: Any) -> Response:
    """The response to a `HubAnswer`, with further fields of its JSON, or to a full disk. Other failures are ours."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = HubAnswer(507, "No space is left on the Hub's disk: nothing of this request was kept.")
    if not isinstance(error, HubAnswer):
        raise error
    # A message may quote any name; a header is one short line of plain characters.
    line = " ".join(error.message.split()).encode("ascii", "backslashreplace").decode()
    headers = {"X-Error-Message": re.sub(r"[^\x20-\x7e]", "?", line)[:1000]}
    if error.code:
        headers["X-Error-Code"] = error.code
    if request.method == "HEAD":
        return Response(status_code=error.status, headers=headers)
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": message, **fields}, status_code=error.status, headers=headers)


# -- what every request passes first -------------------------------------------------------------------------------


class Front:
    """Answers to known names only, keeps encoded slashes, and lets no browser guess what an answer is.

    A page of a stranger's can make a browser take the stranger's name for an address of this machine (DNS rebinding)
    and then ask the Hub as if it were its own server. Such requests carry the stranger's name, and get no answer.

    ``%2F`` inside a revision (``refs%2Fpr%2F1``) must not split the path: while routes are matched it is a control
    character, which their convertors turn back into a slash.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app = app
        self.allowed = {name.lower().strip("[]").removesuffix(".") for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
        scope = {**scope, "path": unquote(re.sub("%2f", ENCODED_SLASH, path, flags=re.IGNORECASE))}
        name, app = _host(Headers(scope=scope).getlist("host")), self.app
        if name not in self.allowed and not _is_loopback(name):
            message = f"This Hub does not answer to the name {name!r}: if it should, start it with --allow-host NAME."
            app = answer(Request(scope), HubAnswer(421, message))
        await app(scope, receive, send_safely)


def _host(named: list[str]) -> str:
    """The name in the only ``Host`` header, without its port; empty if there is no such name."""
    try:
        (header,) = named
        return (urlsplit(f"//{header}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    """Whether a name can only mean this machine, whatever a name server says."""
    try:
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# -- bodies --------------------------------------------------------------------------------------------------------


async def receive(request: Request, write: Callable[[bytes], object], longest: int, refusal: HubAnswer) -> int:
    """Hand a body on in large pieces, each in a thread, where it may wait without holding up anybody else.

    Returns how many bytes it has, and raises ``refusal`` if they are more than ``longest``.
    """
    held, received = bytearray(), 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > longest:
            raise refusal
        held += chunk
        if len(held) >= _BLOCK:
            await run_in_threadpool(write, bytes(held))
            held.clear()
    if held:
        await run_in_threadpool(write, bytes(held))
    return received


def text(body: Body, name: str, default: str | None = None, *, longest: int | None = None) -> str:
    """A field that must be text, of at most ``longest`` characters, and may only be missing if there is a default."""
    value = body.get(name) or default
    # Half of a pair of characters can be spelled in JSON, and is in no file.
    if not isinstance(value, str) or value.encode("utf-8", "ignore").decode() != value:
        raise HubAnswer(400, f"The request needs a text {name!r}")
    if longest is not None and len(value) > longest:
        raise HubAnswer(400, f"{name} has {len(value):,} characters, more than {longest:,}")
    return value


def sizes(body: Body, field: str, name: str) -> list[tuple[str, int]]:
    """The files that a request names in a field, each by ``name``, and their bytes."""
    try:
        check_count(body[field])
        files = [(str(file[name]), file["size"]) for file in body[field]]
    except (KeyError, TypeError):
        raise HubAnswer(400, f"Malformed {field!r}") from None
    if not all(type(size) is int and 0 <= size < 2**63 for _, size in files):
        raise HubAnswer(400, f"Malformed {field!r}: a size is no number of bytes")
    return files


def check_count(items: Sequence[object]) -> None:
    """Refuse a request that names more files than any client does."""
    if len(items) > MAX_FILES:
        raise HubAnswer(413, f"The request names {len(items):,} files, more than {MAX_FILES:,}: send several")
