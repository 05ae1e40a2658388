"""Run the local Hub: for good, or for the length of a block."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

import uvicorn

from .app import create_app
from .users import User, owner_token


def serve(
    root: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8888,
    users: Mapping[str, str | User] | None = None,
    allow_hosts: Collection[str] = (),
) -> None:
    """Serve the repositories under ``root`` until interrupted.

    Args:
        root: folder that holds the repositories, and the `owner_token` of user "demo".
        host: address to listen on.
        port: port to listen on.
        users: who may use it instead of "demo", see `create_app`.
        allow_hosts: see `create_app`; ``host`` itself is allowed.
    """
    token = owner_token(root) if users is None else None
    app = create_app(root, token=token, users=users, allow_hosts=[host, *allow_hosts])
    try:
        uvicorn.run(app, host=host, port=port, log_level="warning")
    finally:
        app.state.hub.storage.close()


class LocalHub:
    """A local Hub that runs in a thread while a ``with`` block lasts.

    Args:
        root: folder that holds the repositories.
        options: see `create_app`.

    Attributes:
        endpoint: its address.
        token: of user "demo", or of the first of ``users``.

    Example:

    ```py
    >>> with LocalHub("hub") as hub:
    ...     HfApi(endpoint=hub.endpoint, token=hub.token).create_repo("demo/adapter")
    ```
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        self.app = create_app(root, **options)
        self.token = next(iter(self.app.state.hub.users), "")
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        # Clients that are cut off in the middle of a transfer may take their time to notice; the end of the block not.
        config = uvicorn.Config(self.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
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
        self.app.state.hub.storage.close()
