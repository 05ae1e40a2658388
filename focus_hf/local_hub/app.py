"""The application: which request goes where, and how it is served, for good or for the length of a block."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from . import contents, pages, pull_requests, repos, uploads
from .http import ENCODED_SLASH, Front, HubAnswer, answer
from .hub import LFS_THRESHOLD, OWNER, Hub, User, owner_token
from .repository import KINDS
from .visit import Visit, answering


class _Part(Convertor[str]):
    """A part of a URL, whose slashes were set aside by `Front` if it has any."""

    def convert(self, value: str) -> str:
        return value.replace(ENCODED_SLASH, "/")


# A type of repository; a branch, tag or commit; the rest of a URL, a path inside a repository, or nothing.
for _name, _regex in {"kind": "|".join(KINDS), "reference": "[^/]+", "file": "(?s:/.+)?"}.items():
    register_url_convertor(_name, type(_name, (_Part,), {"regex": _regex})())

#: Requests about a repository: method, the rest of the URL, and what answers.
_API: list[tuple[str, str, Callable[[Visit], Any]]] = [
    ("GET", "", repos.info),
    ("GET", "/revision/{revision:reference}", repos.info),
    ("PUT", "/settings", repos.settings),
    ("GET", "/auth-check", repos.auth_check),
    ("GET", "/auth-check/{write}", repos.auth_check),
    ("POST", "/user-access-request/grant", repos.grant_access),
    ("GET", "/tree/{revision:reference}{path:file}", contents.tree),
    ("POST", "/paths-info/{revision:reference}", contents.paths_info),
    ("GET", "/commits/{revision:reference}", contents.commits),
    ("GET", "/refs", contents.refs),
    ("POST", "/branch/{ref:reference}", contents.create_branch),
    ("DELETE", "/branch/{ref:reference}", contents.delete_branch),
    ("POST", "/tag/{revision:reference}", contents.create_tag),
    ("DELETE", "/tag/{ref:reference}", contents.delete_tag),
    ("POST", "/preupload/{revision:reference}", uploads.preupload),
    ("GET", "/xet-write-token/{revision:reference}", uploads.xet_token),
    ("GET", "/discussions", pull_requests.list_pull_requests),
    ("POST", "/discussions", pull_requests.open_pull_request),
    ("GET", "/discussions/{number:int}", pull_requests.pull_request),
    ("POST", "/discussions/{number:int}/status", pull_requests.change_status),
    ("POST", "/discussions/{number:int}/merge", pull_requests.merge),
]

_PAGES: list[tuple[str, str, Callable[[Visit], Any]]] = [
    ("POST", ".git/info/lfs/objects/batch", uploads.lfs_batch),
    ("GET", "/resolve/{revision:reference}{path:file}", contents.resolve),
    ("GET", "", pages.page("card", pages.card)),
    ("GET", "/tree/{revision:reference}{path:file}", pages.page("tree", contents.tree)),
    ("GET", "/blob/{revision:reference}{path:file}", pages.page("blob", contents.resolve)),
    ("GET", "/commits/{revision:reference}", pages.page("commits", partial(contents.commits, most=201))),
    ("GET", "/commit/{revision:reference}", pages.page("commit", pages.commit)),
    ("GET", "/discussions", pages.page("pull_requests", pull_requests.list_pull_requests)),
    ("GET", "/discussions/{number:int}", pages.page("pull_request", pull_requests.pull_request)),
]


def _routes() -> list[Route]:
    one = "/{namespace}/{name}"
    rows = [
        ("GET", "/", pages.page("index", pages.index)),
        ("GET", "/api/whoami-v2", repos.whoami),
        ("POST", "/api/validate-yaml", repos.validate_yaml),
        ("POST", "/api/repos/create", repos.create_repo),
        ("DELETE", "/api/repos/delete", repos.delete_repo),
        ("GET", "/api/{kind:kind}", repos.list_repos),
        *((method, f"/api/{{kind:kind}}{one}{rest}", handler) for method, rest, handler in _API),
        *((method, f"/{{kind:kind}}{one}{rest}", handler) for method, rest, handler in _PAGES),
        *((method, f"{one}{rest}", handler) for method, rest, handler in _PAGES),
    ]
    return [
        Route(f"/api/{{kind:kind}}{one}/commit/{{revision:reference}}", uploads.commit, methods=["POST"]),
        Route("/lfs/{oid}", uploads.lfs_upload, methods=["PUT"]),
        *(Route(path, answering(handler), methods=[method]) for method, path, handler in rows),
    ]


def create_app(
    root: str | os.PathLike[str],
    *,
    token: str | None = None,
    users: Mapping[str, str | User] | None = None,
    lfs_threshold: int = LFS_THRESHOLD,
    allow_hosts: Collection[str] = (),
) -> Starlette:
    """A Hugging Face Hub for this machine.

    Everybody may read what is public. Private repositories are shown only to requests with a token of somebody they
    belong to; a browser sends none, so their pages are not found there.

    Args:
        root: folder that holds the repositories.
        token: of user "demo", who may do everything; one that nobody can guess by default.
        users: who may use it instead of "demo", by token; a plain name is a user who may read and write her own
            namespace.
        lfs_threshold: files larger than this many bytes go through Git LFS.
        allow_hosts: names by which it may be asked, besides this machine's own (``localhost``, ``127.0.0.1``).
    """
    handlers: dict[Any, Any] = {
        HubAnswer: answer,
        OSError: answer,
        ClientDisconnect: lambda request, error: Response(status_code=400),  # nobody is there to read it
    }
    app = Starlette(routes=_routes(), exception_handlers=handlers)
    app.state.hub = Hub(root, {token or secrets.token_urlsafe(24): OWNER} if users is None else users, lfs_threshold)
    app.add_middleware(Front, allowed=allow_hosts)
    return app


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
        app.state.hub.close()


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

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()
        self.app.state.hub.close()
