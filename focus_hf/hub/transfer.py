"""One request to a Hub, bounded in time and size whatever the server does, and its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

from huggingface_hub.utils import get_session, hf_raise_for_status

from ..commits import is_connection
from ..escape import one_line
from .errors import LONGEST_REASON, HubError
from .patience import Patience

#: Seconds of silence on a connection after which it is taken for dead.
SILENCE = 10.0

#: Bytes of an answer that is not a file. The longest, a page of a search with whole cards, has one or two million.
LARGEST_ANSWER = 16 * 1024 * 1024

#: How often a request is sent again to a server that is too busy, and a file goes on where its connection broke.
TRIES = 4

#: Answers that ask for another try: too many requests, and trouble of the server's that passes.
_BUSY = (408, 429, 500, 502, 503, 504)

#: Redirects from one address to the next; the Hub needs two.
_REDIRECTS = 5


def request(
    method: str,
    url: str,
    patience: Patience,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    largest: int = LARGEST_ANSWER,
    enough: int | None = None,
) -> Any:
    """The answer of a server, read whole: an `httpx.Response`.

    Args:
        method, url, headers, body: what is asked; the body is sent as JSON.
        patience: of the operation.
        largest: bytes that an answer may have.
        enough: bytes after which no more is read.

    Raises:
        HubError: it is too large, or too slow.
        HfHubHTTPError: the server refused.
    """
    for number in range(TRIES):
        answer = patience.wait_for(
            lambda: _Transfer(url, patience, largest, enough=enough).answer(method, headers, body), url
        )
        if answer.status_code not in _BUSY or number == TRIES - 1:
            break
        _wait(answer, patience, 2.0**number)
    return raise_for_status(answer)


def read_json(answer: Any) -> Any:
    """What an answer says.

    Raises:
        HubError: it is not JSON.
    """
    try:
        return json.loads(answer.content)
    except (ValueError, RecursionError):
        shown = one_line(answer.content[:100].decode("utf-8", "replace"))
        raise HubError(f"{answer.request.url} answered something that is not JSON: {shown!r}") from None


def download(
    url: str,
    target: BinaryIO,
    patience: Patience,
    *,
    headers: Mapping[str, str] | None = None,
    largest: int,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a file; a connection that breaks goes on where it was.

    Raises:
        HubError: it is larger than ``largest`` bytes, or too slow.
        HfHubHTTPError: the server refused.
    """
    left = TRIES
    while True:
        first = target.tell()
        transfer = _Transfer(url, patience, largest - first, target=target, progress=progress)
        wanted = {**(headers or {}), **({"Range": f"bytes={first}-"} if first else {})}
        try:
            answer = patience.wait_for(lambda: transfer.answer("GET", wanted, None), url)  # noqa: B023
        except Exception as error:
            if not is_connection(error) or not left:
                raise
            left = left - 1 if target.tell() == first else TRIES
            time.sleep(min(1.0, max(0.0, patience.left)))
            continue
        if answer.status_code not in _BUSY or not left:
            raise_for_status(answer)
            return
        left -= 1
        _wait(answer, patience, 2.0 ** (TRIES - left - 1))


class _Transfer:
    """One request and its answer, in a thread of its own."""

    def __init__(
        self,
        url: str,
        patience: Patience,
        largest: int,
        *,
        enough: int | None = None,
        target: BinaryIO | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._url, self._patience, self._largest, self._enough = url, patience, largest, enough
        self._target, self._progress = target, progress

    def answer(self, method: str, headers: Mapping[str, str] | None, body: Any) -> Any:
        """The answer, its content in it, or in the file if there is one and it is the file's."""
        client = get_session()
        # No compression: a few bytes could stand for gigabytes.
        sent = {**(headers or {}), "Accept-Encoding": "identity"}
        now = client.build_request(method, self._url, headers=sent, json=body, timeout=SILENCE)
        for _ in range(_REDIRECTS + 1):
            response = client.send(now, stream=True, follow_redirects=False)
            try:
                if response.next_request is None:
                    return self._read(response)
                if now.url.scheme == "https" != response.next_request.url.scheme:
                    raise HubError(f"{self._url} leads to an address that is not encrypted: it is not followed.")
                now = response.next_request
            finally:
                response.close()
        raise HubError(f"{self._url} leads from one address to the next, more than {_REDIRECTS} times.")

    def _read(self, response: Any) -> Any:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubError(f"{self._url} is sent compressed, though asked not to be: it is not read.")
        is_file = self._target is not None and response.is_success
        if is_file:
            self._go_on(response)
        content, received = bytearray(), 0
        for chunk in response.iter_raw():
            if self._patience.over:  # nobody waits any more
                raise HubError(f"{self._url} is too slow.")
            received += len(chunk)
            if self._enough is not None and received >= self._enough:
                content += chunk
                break
            if received > self._largest:
                raise HubError(f"{self._url} sends more than {self._largest:,} bytes: it is not read any further.")
            if is_file:
                self._patience.arrived(len(chunk))
                self._target.write(chunk)  # type: ignore[union-attr]
                if self._progress is not None:
                    self._progress(len(chunk))
            else:
                content += chunk
        headers = {k: v for k, v in response.headers.items() if k not in ("content-length", "transfer-encoding")}
        return type(response)(response.status_code, headers=headers, content=bytes(content), request=response.request)

    def _go_on(self, response: Any) -> None:
        """Start the file again if the server sends all of it instead of the rest."""
        target = self._target
        assert target is not None
        first = target.tell()
        if not first:
            return
        if response.status_code != 206:
            target.seek(0)
            target.truncate()
            self._largest += first
            if self._progress is not None:
                self._progress(-first)
        elif not response.headers.get("content-range", "").startswith(f"bytes {first}-"):
            raise HubError(f"{self._url} sends another part of the file than it was asked for.")


def _wait(answer: Any, patience: Patience, seconds: float) -> None:
    """Wait before asking a busy server again, as long as it says."""
    said = answer.headers.get("retry-after", "")
    if said.isascii() and said.isdecimal():
        seconds = float(said[:20])
    if seconds >= patience.left:
        raise HubError(
            f"{answer.request.url} answered {answer.status_code} and asks to come back in {seconds:,.0f} seconds, "
            f"longer than the {patience.seconds:.0f} that this waits: try again later."
        )
    time.sleep(seconds)


def raise_for_status(answer: Any) -> Any:
    """The answer, or the client's own exception if the server refused."""
    if answer.is_success:
        return answer
    if not answer.is_error:
        raise HubError(f"{answer.request.url} answered {answer.status_code}, which says neither yes nor no.")
    headers = {k: v[:LONGEST_REASON] for k, v in answer.headers.items() if k.startswith("x-")}
    clean = type(answer)(answer.status_code, headers=headers, json={"error": _reason(answer)}, request=answer.request)
    hf_raise_for_status(clean)
    return answer


def _reason(answer: Any) -> str | None:
    """What a server says of its refusal; the client's own reader expects a mapping."""
    try:
        said = json.loads(answer.content)
    except (ValueError, RecursionError):
        return None
    error = said.get("error") if isinstance(said, dict) else None
    return error[:LONGEST_REASON] if isinstance(error, str) else None


@contextmanager
def bounded_answers() -> Iterator[None]:
    """Bound the answers that the library itself reads inside the block, where it has no bounds of its own.

    Downloads are left alone. A client that the library makes anew after a failed connection has no bound again.
    """
    hooks = get_session().event_hooks["response"]

    def bound(response: Any) -> None:
        if "/resolve/" not in response.request.url.path:
            is_packed = response.headers.get("content-encoding", "identity") != "identity"
            response.stream = _bounded(response, LARGEST_ANSWER // _UNPACKS_TO if is_packed else LARGEST_ANSWER)

    hooks.append(bound)
    try:
        yield
    finally:
        hooks.remove(bound)


#: What a compressed byte may stand for, about.
_UNPACKS_TO = 256


def _bounded(response: Any, largest: int) -> Any:
    """The stream of an answer, which ends with an error after so many bytes."""
    library: Any = import_module(type(response).__module__.partition(".")[0])  # httpx, or what has come after it
    whole = response.stream

    class Bounded(library.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            received = 0
            for chunk in whole:
                received += len(chunk)
                if received > largest:
                    raise HubError(f"{response.request.url} answers with more than {largest:,} bytes.")
                yield chunk

        def close(self) -> None:
            whole.close()

    return Bounded()
