"""Run the local Hub: for good, or for the length of a block."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import TracebackType
from typing import Any

import uvicorn

from .app import create_app


def serve(root: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 8888) -> None:
    """Serve the repositories under ``root`` until interrupted."""
    uvicorn.run(create_app(root), host=host, port=port, log_level="warning")


class LocalHub:
    """A local Hub that runs in a thread while a ``with`` block lasts.

    Args:
        root: folder that holds the repositories.
        options: see `create_app`.

    Example:

    ```py
    >>> with LocalHub("hub") as hub:
    ...     HfApi(endpoint=hub.endpoint, token="any").create_repo("demo/adapter")
    ```
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(create_app(root, **options), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> LocalHub:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"The local Hub did not start at {self.endpoint}.")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()
