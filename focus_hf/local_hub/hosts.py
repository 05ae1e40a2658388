"""Names that the Hub answers to.

A page of a stranger's can make a browser take the stranger's name for an address of this machine (DNS rebinding) and
then ask the Hub as if it were its own server. Such requests carry the stranger's name, and get no answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import HubAnswer, answer


class OnlyKnownHosts:
    """Answers requests to this machine's own names, and to further ones that it was told.

    Args:
        app: what answers them.
        allowed: further names, without ports.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        self.app = app
        self.allowed = frozenset(_plain(name) for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        named = Headers(scope=scope).getlist("host")
        name = _host(named[0]) if len(named) == 1 else ""
        if is_loopback(name) or name in self.allowed:
            await self.app(scope, receive, send)
            return
        message = f"This Hub does not answer to the name {name!r}: if it should, start it with --allow-host NAME."
        await answer(Request(scope), HubAnswer(421, message))(scope, receive, send)


def is_loopback(name: str) -> bool:
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
