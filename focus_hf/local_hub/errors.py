"""Errors as the Hub answers them."""

from __future__ import annotations

import errno
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


class HubAnswer(Exception):
    """An error answer: status, message, and the code by which `huggingface_hub` chooses its exception.

    Args:
        status: HTTP status.
        message: what went wrong.
        code: ``RepoNotFound``, ``RevisionNotFound``, ``EntryNotFound``, ``GatedRepo`` or ``None``.
        extra: further fields of the JSON body.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.extra, self.headers = extra or {}, headers or {}


def answer(request: Request, error: Exception) -> Response:
    """Turn a `HubAnswer` into its HTTP response."""
    assert isinstance(error, HubAnswer)
    headers = {"X-Error-Message": _header(error.message), **error.headers}
    if error.code:
        headers["X-Error-Code"] = error.code
    if request.method == "HEAD":
        return Response(status_code=error.status, headers=headers)
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": message, **error.extra}, status_code=error.status, headers=headers)


def out_of_space(request: Request, error: Exception) -> Response:
    """Say that a request did not fit on the disk; nothing of it is kept. Any other failure is ours."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return answer(request, HubAnswer(507, "No space is left on the Hub's disk: nothing of this request was kept."))


def _header(message: str) -> str:
    """A message as the value of a header: it may quote any name, a header is one short line of plain characters."""
    line = " ".join(message.split()).encode("ascii", "backslashreplace").decode()
    return re.sub(r"[^\x20-\x7e]", "?", line)[:1000]
