"""Reading what a client sends: small JSON bodies, and large ones without holding up everybody else."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .errors import HubAnswer

#: Bytes of a JSON body. The longest that a client sends holds a whole card, to have its metadata checked.
MAX_JSON = 8 * 1024 * 1024

#: Files that one request may name; clients send a few hundred at a time.
MAX_FILES = 25_000

#: Fields of a form; no request has more than a handful.
_MAX_FIELDS = 100

Body = dict[str, Any]


def with_body(handler: Callable[[Request, Body], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that also gets the fields of the request's body, and runs in a thread, where it may wait."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        raw = bytearray()
        try:
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_JSON:
                    raise HubAnswer(413, f"The request has more than {MAX_JSON:,} bytes")
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        return await run_in_threadpool(lambda: handler(request, _fields(request, bytes(raw))))

    return handle


def _fields(request: Request, raw: bytes) -> Body:
    try:
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return parse_qs(raw.decode("utf-8", "replace"), max_num_fields=_MAX_FIELDS)
        body = read_json(raw) if raw else {}
    except (ValueError, RecursionError):
        raise HubAnswer(400, "The request is not valid JSON") from None
    if body is None:
        return {}
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
    if not isinstance(value, str) or not _encodes(value):
        raise HubAnswer(400, f"The request needs a text {name!r}")
    if longest is not None and len(value) > longest:
        raise HubAnswer(400, f"{name} has {len(value):,} characters, more than {longest:,}")
    return value


def number_of_bytes(value: object) -> int:
    """The size of a file, as a client states it.

    Raises:
        ValueError: no file can have it.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def check_count(items: Sequence[object]) -> None:
    """Refuse a request that names more files than any client does.

    Raises:
        HubAnswer: 413.
    """
    if len(items) > MAX_FILES:
        raise HubAnswer(413, f"The request names {len(items):,} files, more than {MAX_FILES:,}: send several")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair, which JSON can spell and no file can hold
        return False
    return True
