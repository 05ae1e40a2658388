"""What all requests share: what they pass first, how their bodies are read, and how errors are answered."""

from __future__ import annotations

import errno
import functools
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bytes of a JSON body. The longest that a client sends holds a whole card, to have its metadata checked.
MAX_JSON = 8 * 1024 * 1024

#: Files that one request may name; clients send a few hundred at a time.
MAX_FILES = 25_000

#: Fields of a form; no request has more than a handful.
_MAX_FIELDS = 100

#: Stands for an encoded slash while routes are matched.
ENCODED_SLASH = "\x1f"

_BLOCK = 1 << 20

Body = dict[str, Any]


# -- errors --------------------------------------------------------------------------------------------------------


class HubAnswer(Exception):
    """An error answer: status, message, and the code by which `huggingface_hub` chooses its exception.

    Args:
        status: HTTP status.
        message: what went wrong.
        code: ``RepoNotFound``, ``RevisionNotFound``, ``EntryNotFound``, ``GatedRepo`` or ``None``.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Gone(HubAnswer):
    """There is no such repository, or it was deleted since the request found it."""

    def __init__(self) -> None:
        super().__init__(404, "Repository not found", code="RepoNotFound")


def answer(request: Request, error: Exception, **fields: Any) -> Response:
    """Turn a `HubAnswer` into its HTTP response; ``fields`` are further ones of its JSON."""
    assert isinstance(error, HubAnswer)
    # A message may quote any name; a header is one short line of plain characters.
    line = " ".join(error.message.split()).encode("ascii", "backslashreplace").decode()
    headers = {"X-Error-Message": re.sub(r"[^\x20-\x7e]", "?", line)[:1000]}
    if error.code:
        headers["X-Error-Code"] = error.code
    if request.method == "HEAD":
        return Response(status_code=error.status, headers=headers)
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": message, **fields}, status_code=error.status, headers=headers)


def out_of_space(request: Request, error: Exception) -> Response:
    """Say that a request did not fit on the disk; nothing of it is kept. Any other failure is ours."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return answer(request, HubAnswer(507, "No space is left on the Hub's disk: nothing of this request was kept."))


# -- what every request passes first -------------------------------------------------------------------------------


class Front:
    """Answers to known names only, keeps encoded slashes, and lets no browser guess what an answer is.

    A page of a stranger's can make a browser take the stranger's name for an address of this machine (DNS rebinding)
    and then ask the Hub as if it were its own server. Such requests carry the stranger's name, and get no answer.

    ``%2F`` inside a revision (``refs%2Fpr%2F1``) must not split the path: while routes are matched it is a control
    character, which their convertors turn back into a slash.

    Args:
        app: what answers.
        allowed: names, without ports, besides this machine's own.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app = app
        self.allowed = frozenset(map(_plain, allowed))

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

        named, path = Headers(scope=scope).getlist("host"), scope["raw_path"].decode("latin-1")
        scope = {**scope, "path": unquote(re.sub("%2f", ENCODED_SLASH, path, flags=re.IGNORECASE))}
        name, app = _host(named[0]) if len(named) == 1 else "", self.app
        if not (_is_loopback(name) or name in self.allowed):
            message = f"This Hub does not answer to the name {name!r}: if it should, start it with --allow-host NAME."
            app = answer(Request(scope), HubAnswer(421, message))
        await app(scope, receive, send_safely)


def _is_loopback(name: str) -> bool:
    """Whether a name can only mean this machine, whatever a name server says."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """The name in a ``Host`` header, without its port; empty if there is none."""
    try:
        return _plain(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


# -- bodies --------------------------------------------------------------------------------------------------------


async def receive(request: Request, write: Callable[[bytes], object], longest: int, refusal: HubAnswer) -> int:
    """Hand a body on in large pieces, each in a thread, where it may wait without holding up anybody else.

    Returns:
        Its bytes.

    Raises:
        HubAnswer: ``refusal``, if it has more than ``longest`` bytes.
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
    await run_in_threadpool(write, bytes(held))
    return received


def with_body(handler: Callable[[Request, Body], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that also gets the fields of the request's body, and runs in a thread, where it may wait."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        raw = bytearray()
        await receive(request, raw.extend, MAX_JSON, HubAnswer(413, f"The request has more than {MAX_JSON:,} bytes"))
        return await run_in_threadpool(lambda: handler(request, _fields(request, bytes(raw))))

    return handle


def _fields(request: Request, raw: bytes) -> Body:
    try:
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return parse_qs(raw.decode("utf-8", "replace"), max_num_fields=_MAX_FIELDS)
        body = read_json(raw or b"{}")
    except (ValueError, RecursionError):
        raise HubAnswer(400, "The request is not valid JSON") from None
    if not isinstance(body, dict):
        raise HubAnswer(400, "The request must be a JSON object")
    return body


def read_json(raw: bytes) -> Any:
    """JSON as the standard has it: Python's reader takes ``NaN`` and ``Infinity`` for numbers as well.

    Raises:
        ValueError: it is not valid.
        RecursionError: it is nested too deep.
    """
    return json.loads(raw, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def text(body: Body, name: str, default: str | None = None, *, longest: int | None = None) -> str:
    """A field that must be text, and may only be empty or missing if there is a default.

    Raises:
        HubAnswer: 400 if it is anything else, or has more than ``longest`` characters.
    """
    value = body.get(name) or default
    # Half of a pair of characters can be spelled in JSON, and is in no file.
    if not isinstance(value, str) or value.encode("utf-8", "ignore").decode() != value:
        raise HubAnswer(400, f"The request needs a text {name!r}")
    if longest is not None and len(value) > longest:
        raise HubAnswer(400, f"{name} has {len(value):,} characters, more than {longest:,}")
    return value


def sizes(body: Body, field: str, name: str) -> list[tuple[str, int]]:
    """The files that a request names in a field, each by ``name``, and their bytes.

    Raises:
        HubAnswer: 400 if that is not what it holds, 413 if there are more than any client sends.
    """
    try:
        check_count(body[field])
        files = [(str(file[name]), file["size"]) for file in body[field]]
    except (KeyError, TypeError):
        raise HubAnswer(400, f"Malformed {field!r}") from None
    if not all(type(size) is int and 0 <= size < 2**63 for _, size in files):
        raise HubAnswer(400, f"Malformed {field!r}: a size is no number of bytes")
    return files


def check_count(items: Sequence[object]) -> None:
    """Refuse a request that names more files than any client does.

    Raises:
        HubAnswer: 413.
    """
    if len(items) > MAX_FILES:
        raise HubAnswer(413, f"The request names {len(items):,} files, more than {MAX_FILES:,}: send several")
