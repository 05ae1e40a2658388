"""What a server may do while `huggingface_hub` talks to it for us: for how long, how much, with which token.

The library waits and reads without end, and takes a server's headers for paths. Its requests are looked at here, by
hooks of its own client that do nothing outside `Bounds.run`.
"""

from __future__ import annotations

import contextvars
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub.utils import _http, get_session

from ..escape import one_line
from .errors import LONGEST_REASON, HubError, readable

#: Seconds that a command waits for a Hub in all, beyond the time in which files arrive. The Hub answers within one.
PATIENCE = 60.0

#: Bytes a second at which files arrive at least: the slowest connections that people have send twice as many.
SLOWEST = 10_000

#: Seconds of silence on a connection after which it is taken for dead, where the library has no limit of its own.
SILENCE = 10.0

#: Bytes of an answer that is not a file. The longest, a page of a search with whole cards, has one or two million.
LARGEST_ANSWER = 16 * 1024 * 1024

#: What may become the name of a file: the library puts ETags and commits into paths.
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ETAG = re.compile(r'(W/)?"?[0-9A-Za-z][0-9A-Za-z._-]{0,200}"?')

T = TypeVar("T")


class Bounds:
    """How long one command still waits for a Hub, and where its token may go.

    Args:
        endpoint: of the Hub; nobody else sees the token.
        seconds: at most, beyond the time that arriving bytes give it; `PATIENCE` by default.
    """

    def __init__(self, endpoint: str, seconds: float | None = None) -> None:
        self.endpoint, self.seconds = endpoint, PATIENCE if seconds is None else seconds
        self._until = time.monotonic() + self.seconds
        self.over = False

    @property
    def left(self) -> float:
        return 0.0 if self.over else self._until - time.monotonic()

    def arrived(self, count: int) -> None:
        """Bytes of a file have arrived, or are to be sent: it may take longer."""
        self._until += count / SLOWEST

    def run(self, work: Callable[[], T], *, largest: int = LARGEST_ANSWER, is_file: bool = False) -> T:
        """The result of ``work``, which asks through `huggingface_hub`, in a thread of its own.

        Args:
            largest: bytes of an answer.
            is_file: it is a file that is downloaded into the cache.

        Raises:
            HubError: it was not done in time (the thread ends with its next byte), an answer was too large, or the
                library could make no sense of one.
            HfHubHTTPError, OSError: as the library says it.
        """
        _watch()
        done: Future[T] = Future()
        context = contextvars.copy_context()
        context.run(_LIMIT.set, _Limit(self, largest, is_file))

        def run() -> None:
            try:
                done.set_result(context.run(work))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name="focus_hf-hub").start()
        try:
            while not wait([done], timeout=max(0.0, min(self.left, 1.0))).done:
                if self.left <= 0:
                    raise self.too_slow()
        except BaseException:  # Ctrl-C as well
            self.over = True
            raise
        if isinstance(error := done.exception(), Exception):
            raise readable(error, self.endpoint) from None
        return done.result()

    def too_slow(self) -> HubError:
        return HubError(
            f"{self.endpoint} did not answer within {self.seconds:.0f} seconds, or sends less than {SLOWEST:,} bytes "
            "a second: try again later."
        )


@dataclass(frozen=True)
class _Limit:
    """The bounds of one answer, and of every request and answer of a chain of redirects to it."""

    bounds: Bounds
    largest: int
    is_file: bool


_LIMIT: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar("focus_hf_limit", default=None)


def _before(request: Any) -> None:
    """The token goes to the Hub alone, nothing comes compressed, and no silence lasts."""
    if (limit := _LIMIT.get()) is None:
        return
    if limit.bounds.over:  # nobody waits any more
        raise limit.bounds.too_slow()
    endpoint, url = limit.bounds.endpoint, str(request.url)
    if endpoint.startswith("https:") and not url.startswith("https:"):
        raise HubError(f"{endpoint} leads to an address that is not encrypted: it is not followed.")
    if not same_origin(url, endpoint):
        request.headers.pop("authorization", None)
    request.headers["accept-encoding"] = "identity"  # a few bytes could stand for gigabytes
    limits = request.extensions.get("timeout") or {}
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {kind: SILENCE if limits.get(kind) is None else limits[kind] for kind in kinds}


def _after(response: Any) -> None:
    """No header becomes a path, a command to the terminal, another way to download or a long sleep."""
    if (limit := _LIMIT.get()) is None:
        return
    request, headers, bounds = response.request, response.headers, limit.bounds
    for name, value in headers.items():
        if not value.isprintable() or name == "x-xet-hash" or len(value) > 8 * LONGEST_REASON:
            del headers[name]
    if limit.is_file and request.method == "HEAD":
        commit, etags = headers.get("x-repo-commit"), (headers.get("x-linked-etag"), headers.get("etag"))
        if commit is not None and not _COMMIT.fullmatch(commit):
            raise HubError(f"{bounds.endpoint} names a commit {one_line(commit)!r}, which cannot be.")
        if any(etag is not None and not _ETAG.fullmatch(etag) for etag in etags):
            raise HubError(f"{bounds.endpoint} gives a file an ETag that cannot be a name: it is not read.")
    if headers.get("content-encoding", "identity") != "identity":
        raise HubError(f"{request.url} is sent compressed, though asked not to be: it is not read.")
    if response.status_code in (408, 429, 500, 502, 503, 504):
        said = [headers.get("retry-after", ""), *re.findall(r"\bt=(\d+)", headers.get("ratelimit", ""))]
        seconds = max((float(text[:20]) for text in said if text.isascii() and text.isdecimal()), default=0.0)
        if seconds >= bounds.left:
            raise HubError(
                f"{request.url} answered {response.status_code} and asks to come back in {seconds:,.0f} seconds, "
                f"longer than the {bounds.seconds:.0f} that this waits: try again later."
            )
    response.stream = _bounded(response, limit)


def _watched(make: Callable[[], Any]) -> Any:
    """A client of the library's, with the hooks in it."""
    client = make()
    for kind, hook in (("request", _before), ("response", _after)):
        if hook not in client.event_hooks[kind]:
            client.event_hooks[kind].append(hook)
    return client


def _watch() -> None:
    """Put the hooks into the library's client, and into those that it makes anew after a failed connection."""
    if getattr(_http._GLOBAL_CLIENT_FACTORY, "func", None) is not _watched:
        # `set_client_factory` would close the client under other threads
        _http._GLOBAL_CLIENT_FACTORY = partial(_watched, _http._GLOBAL_CLIENT_FACTORY)
    _watched(get_session)


def _bounded(response: Any, limit: _Limit) -> Any:
    """The stream of an answer, which ends with an error where it is too long or nobody waits any more."""
    library: Any = import_module(type(response).__module__.partition(".")[0])  # httpx, or what has come after it
    whole, bounds, url = response.stream, limit.bounds, response.request.url
    wanted = re.match(r"bytes=(\d{1,18})-", response.request.headers.get("range", ""))
    is_file = limit.is_file and response.is_success
    first = int(wanted[1]) if is_file and wanted and response.status_code == 206 else 0  # it goes on where it broke
    largest = limit.largest if response.is_success else LARGEST_ANSWER

    class Bounded(library.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            received = first
            for chunk in whole:
                if bounds.over:
                    raise bounds.too_slow()
                received += len(chunk)
                if received > largest:
                    raise HubError(f"{url} sends more than {largest:,} bytes: it is not read any further.")
                if is_file:
                    bounds.arrived(len(chunk))
                yield chunk

        def close(self) -> None:
            whole.close()

    return Bounded()


def same_origin(url: str, endpoint: str) -> bool:
    """Whether an address is on the same server, reached in the same way; `ValueError` if it is no address."""
    one, other = urlsplit(url), urlsplit(endpoint)
    ports = [parts.port or {"http": 80, "https": 443}.get(parts.scheme) for parts in (one, other)]
    return (one.scheme, one.hostname, ports[0]) == (other.scheme, other.hostname, ports[1])
