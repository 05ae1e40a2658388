"""A server that answers as it likes, byte by byte: an honest Hub of one adapter, and what goes wrong with it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
REPO = "org/adapter"


@dataclass
class Asked:
    """A request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """What is asked for: ``info``, ``list``, ``header`` (of the weights), a file's name, or what a push does."""
        if "/resolve/" in self.path:
            name = self.path.partition("/resolve/")[2].partition("/")[2]
            return "header" if name == "adapter_model.safetensors" and "range" in self.headers else name
        if self.path == "/api/models":
            return "list"
        if self.path.startswith(f"/api/models/{REPO}"):
            last = self.path.removeprefix(f"/api/models/{REPO}").strip("/").partition("/")[0]
            return "info" if last in ("", "revision") else last
        return self.path.rpartition("/")[2] if self.path.startswith("/api/") else "other"


#: What a server sends: bytes as they are, or pieces of them.
Sent = bytes | AsyncIterator[bytes]


def answer(content: bytes | str = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole answer."""
    body = content if isinstance(content, bytes) else content.encode()
    lines = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value != "none")
    return f"HTTP/1.1 {status}\r\n{head}connection: close\r\n\r\n".encode() + body


def as_json(value: object, **headers: str) -> bytes:
    return answer(json.dumps(value), content_type="application/json", **headers)


async def pieces(start: bytes, piece: bytes, wait: float = 0.0) -> AsyncIterator[bytes]:
    """A beginning, and then the same without end."""
    yield start
    while True:
        yield piece
        await asyncio.sleep(wait)


async def then_silence(start: bytes) -> AsyncIterator[bytes]:
    yield start
    await asyncio.sleep(3600)


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class HonestHub:
    """Answers for one adapter as a Hub does.

    Args:
        files: of the adapter, by name.
        card: its metadata.
    """

    files: dict[str, bytes]
    card: dict[str, object] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        siblings = []
        for name, content in self.files.items():
            siblings.append({"rfilename": name, "size": len(content), "blobId": git_name(content)})
        return {
            "id": REPO,
            "sha": COMMIT,
            "private": False,
            "gated": False,
            "downloads": 3,
            "likes": 1,
            "cardData": self.card,
            "tags": ["focus", "base_model:adapter:org/base"],
            "siblings": siblings,
            "lastModified": "2026-01-01T00:00:00Z",
        }

    def __call__(self, asked: Asked) -> Sent:
        if asked.kind == "list":
            return as_json([self.describe()])
        if asked.kind == "info":
            return as_json(self.describe())
        if "/resolve/" in asked.path:
            return self.file(asked)
        if asked.kind == "create":
            return as_json({"url": f"http://{asked.headers['host']}/{REPO}", "name": REPO})
        if asked.kind == "validate-yaml":
            return as_json({"warnings": [], "errors": []})
        if asked.kind == "preupload":
            wanted = json.loads(asked.body)["files"]
            rows = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in wanted]
            return as_json({"files": rows})
        if asked.kind == "commit":
            url = f"http://{asked.headers['host']}/{REPO}/commit/{'d' * 40}"
            return as_json({"success": True, "commitOid": "d" * 40, "commitUrl": url})
        return answer(b'{"error": "Entry not found"}', "404 Not Found", x_error_code="EntryNotFound")

    def file(self, asked: Asked) -> Sent:
        revision, _, name = asked.path.partition(f"/{REPO}/resolve/")[2].partition("/")
        content = self.files.get(name) if revision in ("main", COMMIT) else None
        if content is None:
            return answer(b"", "404 Not Found", x_error_code="EntryNotFound")
        first, _, last = asked.headers.get("range", "").removeprefix("bytes=").partition("-")
        if not first:
            return answer(content, x_repo_commit=COMMIT, etag=f'"{git_name(content)}"')
        stop = min(int(last) + 1 if last else len(content), len(content))
        part = content[int(first) : stop]
        return answer(part, "206 Partial Content", content_range=f"bytes {first}-{stop - 1}/{len(content)}")


class HostileHub:
    """Serves in a thread while a ``with`` block lasts.

    Args:
        handle: what to send for a request; may be changed at any time.
    """

    def __init__(self, handle: Callable[[Asked], Sent]) -> None:
        self.handle = handle
        self.asked: list[Asked] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> HostileHub:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ", 2)
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if "chunked" in headers.get("transfer-encoding", ""):
                body = await reader.readuntil(b"0\r\n\r\n")
            parts = urlsplit(target)
            asked = Asked(method, unquote(parts.path), parts.query, headers, body)
            self.asked.append(asked)
            sent = self.handle(asked)
            async for piece in _in_pieces(sent):
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _in_pieces(sent: Sent) -> AsyncIterator[bytes]:
    if isinstance(sent, bytes):
        yield sent
        return
    async for piece in sent:
        yield piece


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
