"""The application: which request goes where, and how it is served, for good or for the length of a block."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from . import commits, contents, describe, lfs, pages, repos
from . import pull_requests as pulls
from .http import ENCODED_SLASH, Front, HubAnswer, answer, out_of_space
from .hub import LFS_THRESHOLD, OWNER, Hub, User, new_token, owner_token
from .repository import KINDS


class KindConvertor(Convertor[str]):
    """One segment of a URL: a type of repository."""

    regex = "|".join(KINDS)

    def convert(self, value: str) -> str:
        return value.replace(ENCODED_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value.replace("/", ENCODED_SLASH)


class ReferenceConvertor(KindConvertor):
    """One segment of a URL: a branch, tag or commit."""

    regex = "[^/]+"


class FileConvertor(KindConvertor):
    """The rest of a URL: a path inside a repository."""

    regex = "(?s:.+)"


register_url_convertor("kind", KindConvertor())
register_url_convertor("reference", ReferenceConvertor())
register_url_convertor("file", FileConvertor())


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
        OSError: out_of_space,
        ClientDisconnect: lambda request, error: Response(status_code=400),  # nobody is there to read it
    }
    app = Starlette(routes=[*_api_routes(), *_routes()], exception_handlers=handlers)
    app.state.hub = Hub(root, {token or new_token(): OWNER} if users is None else users, lfs_threshold)
    app.add_middleware(Front, allowed=allow_hosts)
    return app


def _api_routes() -> list[Route]:
    api, delete, post, put = "/api/{kind:kind}/{namespace}/{name}", ["DELETE"], ["POST"], ["PUT"]
    both = [*post, *delete]
    one = f"{api}/discussions/{{number:int}}"
    return [
        Route("/api/whoami-v2", repos.whoami),
        Route("/api/validate-yaml", repos.validate_yaml, methods=post),
        Route("/api/repos/create", repos.create_repo, methods=post),
        Route("/api/repos/delete", repos.delete_repo, methods=delete),
        Route("/api/{kind:kind}", describe.list_repos),
        Route(api, describe.info),
        Route(f"{api}/settings", repos.settings, methods=put),
        Route(f"{api}/auth-check", repos.auth_check),
        Route(f"{api}/auth-check/{{write}}", repos.auth_check),
        Route(f"{api}/revision/{{revision:reference}}", describe.info),
        Route(f"{api}/tree/{{revision:reference}}", contents.tree),
        Route(f"{api}/tree/{{revision:reference}}/{{path:file}}", contents.tree),
        Route(f"{api}/paths-info/{{revision:reference}}", contents.paths_info, methods=post),
        Route(f"{api}/commits/{{revision:reference}}", contents.commits),
        Route(f"{api}/refs", contents.refs),
        Route(f"{api}/branch/{{ref:reference}}", contents.branch, methods=both),
        Route(f"{api}/tag/{{ref:reference}}", contents.tag, methods=both),
        Route(f"{api}/preupload/{{revision:reference}}", commits.preupload, methods=post),
        Route(f"{api}/xet-write-token/{{revision:reference}}", commits.xet_token),
        Route(f"{api}/commit/{{revision:reference}}", commits.commit, methods=post),
        Route(f"{api}/user-access-request/grant", repos.grant_access, methods=post),
        Route(f"{api}/discussions", pulls.list_pull_requests),
        Route(f"{api}/discussions", pulls.open_pull_request, methods=post),
        Route(one, pulls.pull_request),
        Route(f"{one}/status", pulls.change_status, methods=post),
        Route(f"{one}/merge", pulls.merge, methods=post),
        Route("/lfs/{oid}", lfs.lfs_upload, methods=put),
    ]


def _routes() -> list[Route]:
    routes = [Route("/", pages.index)]
    for prefix in ("/{kind:kind}", ""):
        git = f"{prefix}/{{namespace}}/{{name}}"
        routes += [
            Route(f"{git}.git/info/lfs/objects/batch", lfs.lfs_batch, methods=["POST"]),
            Route(f"{git}/resolve/{{revision:reference}}/{{path:file}}", contents.resolve),
            Route(git, pages.card),
            Route(f"{git}/tree/{{revision:reference}}", pages.tree),
            Route(f"{git}/tree/{{revision:reference}}/{{path:file}}", pages.tree),
            Route(f"{git}/blob/{{revision:reference}}/{{path:file}}", pages.blob),
            Route(f"{git}/commits/{{revision:reference}}", pages.commits),
            Route(f"{git}/commit/{{revision:reference}}", pages.commit),
            Route(f"{git}/discussions", pages.pull_requests),
            Route(f"{git}/discussions/{{number:int}}", pages.pull_request),
        ]
    return routes


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
