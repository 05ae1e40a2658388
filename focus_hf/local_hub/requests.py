"""Reading what a client sends: small JSON bodies, and large ones without holding up everybody else."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .errors import HubAnswer

#: Larger bodies than this are no JSON of a client's.
MAX_JSON = 32 * 1024 * 1024

Body = dict[str, Any]


def with_body(handler: Callable[[Request, Body], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that also gets the fields of the request's body, and runs in a thread, where it may wait."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            body = await _fields(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        return await run_in_threadpool(handler, request, body)

    return handle


async def _fields(request: Request) -> Body:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_JSON:
            raise HubAnswer(413, "The request is too large")
    if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return parse_qs(raw.decode("utf-8", "replace"))
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise HubAnswer(400, "The request is not valid JSON") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise HubAnswer(400, "The request must be a JSON object")
    return body


def text(body: Body, name: str, default: str | None = None) -> str:
    """A field that must be text, and may only be empty or missing if there is a default.

    Raises:
        HubAnswer: 400 if it is anything else.
    """
    value = body.get(name) or default
    if isinstance(value, str) and _encodes(value):
        return value
    raise HubAnswer(400, f"The request needs a text {name!r}")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair, which JSON can spell and no file can hold
        return False
    return True
