"""Errors as the Hub answers them."""

from __future__ import annotations

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
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.extra = status, message, code, extra or {}


def answer(request: Request, error: Exception) -> Response:
    """Turn a `HubAnswer` into its HTTP response."""
    assert isinstance(error, HubAnswer)
    line = error.message.replace("\n", " ")
    # Headers are latin-1; a message may quote any file name.
    headers = {"X-Error-Message": line.encode("ascii", "backslashreplace").decode()}
    if error.code:
        headers["X-Error-Code"] = error.code
    if request.method == "HEAD":
        return Response(status_code=error.status, headers=headers)
    return JSONResponse({"error": error.message, **error.extra}, status_code=error.status, headers=headers)
