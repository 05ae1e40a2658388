"""Uploads of large files, and the signed addresses that they go to."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool

from .errors import HubAnswer
from .locks import Gone
from .staging import Staging

#: An upload must start within this many seconds after it was announced.
UPLOAD_STARTS_WITHIN = 6 * 3600

#: Bytes of a file: as many as the real Hub takes in one.
MAX_LFS = 50 * 1000**3

_BLOCK = 1 << 20


async def receive(target: Path, oid: str, size: int, chunks: AsyncIterator[bytes], staging: Staging) -> None:
    """Store an upload; refused, and nothing kept, if its content is not what its name says.

    Args:
        target: where it goes.
        oid: sha256 of the content.
        size: its bytes.
        chunks: what arrives.
        staging: for as long as it is not complete.
    """
    digest, received = hashlib.sha256(), 0
    partial = staging.new_file()

    def write(block: bytes) -> None:
        digest.update(block)
        file.write(block)

    try:
        with partial.open("wb") as file:
            async for block in _blocks(chunks):
                received += len(block)
                if received > size:
                    raise HubAnswer(422, f"The upload is longer than the {size} bytes that were announced.")
                await run_in_threadpool(write, block)
            if received != size:
                raise HubAnswer(422, f"The upload has {received} bytes; {size} were announced.")
            if digest.hexdigest() != oid:
                raise HubAnswer(422, f"The uploaded content has sha256 {digest.hexdigest()}, not {oid}.")
            file.flush()
            await run_in_threadpool(os.fsync, file.fileno())
        os.replace(partial, target)
    except FileNotFoundError:
        raise Gone from None
    finally:
        partial.unlink(missing_ok=True)


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in fewer, larger pieces, because each is a trip to another thread."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= _BLOCK:
            yield bytes(held)
            held.clear()
    yield bytes(held)


# -- signed addresses ----------------------------------------------------------------------------------------------
# The client sends no token to the address that the batch answer gives, as it may be another company's storage.


def signed_query(secret: bytes, oid: str, kind: str, repo_id: str, size: int) -> str:
    """Query of an upload address: permission to store this one file, for this repository."""
    expires = int(time.time()) + UPLOAD_STARTS_WITHIN
    fields = {"kind": kind, "repo": repo_id, "size": str(size), "expires": str(expires)}
    return urlencode({**fields, "signature": _signature(secret, oid, fields)})


def check_signature(secret: bytes, oid: str, query: dict[str, str]) -> tuple[str, str, int]:
    """Kind, id and size that a signed query allows to upload.

    Raises:
        HubAnswer: 403 if it was not signed here, or too long ago.
    """
    fields = {name: query.get(name, "") for name in ("kind", "repo", "size", "expires")}
    if not hmac.compare_digest(_signature(secret, oid, fields).encode(), query.get("signature", "").encode()):
        raise HubAnswer(403, "This is not an upload address that this Hub gave out.")
    if int(fields["expires"]) < time.time():
        raise HubAnswer(403, "This upload address has expired.")
    return fields["kind"], fields["repo"], int(fields["size"])


def _signature(secret: bytes, oid: str, fields: dict[str, str]) -> str:
    return hmac.new(secret, "\n".join([oid, *fields.values()]).encode(), hashlib.sha256).hexdigest()
