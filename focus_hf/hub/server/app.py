"""The application: which request goes where."""

from __future__ import annotations

import os
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import routes_commits as commits
from . import routes_files as files
from . import routes_repos as repos
from .access import Hub
from .errors import HubAnswer, answer
from .storage import Storage

_ENCODED_SLASH = "\x1f"


class ReferenceConvertor(Convertor[str]):
    """One segment of a URL: a branch, tag or commit."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return value.replace(_ENCODED_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value.replace("/", _ENCODED_SLASH)


class FileConvertor(ReferenceConvertor):
    """The rest of a URL: a path inside a repository."""

    regex = ".+"


register_url_convertor("reference", ReferenceConvertor())
register_url_convertor("file", FileConvertor())

#: Files up to this size are committed directly, so that clients with hf_xet installed work as they are: for LFS files
#: such a client asks for a Xet store, which only the real Hub has. Adapters are far smaller than this.
LFS_THRESHOLD = 64 * 1024 * 1024


def create_app(
    root: str | os.PathLike[str], *, users: dict[str, str] | None = None, lfs_threshold: int = LFS_THRESHOLD
) -> Starlette:
    """A Hugging Face Hub for this machine.

    Args:
        root: folder that holds the repositories.
        users: user name by token; by default any token is accepted, as user "demo".
        lfs_threshold: files larger than this many bytes go through Git LFS.
    """
    api = "/api/{kind}/{namespace}/{name}"
    routes = [
        Route("/api/whoami-v2", repos.whoami),
        Route("/api/validate-yaml", repos.validate_yaml, methods=["POST"]),
        Route("/api/repos/create", repos.create_repo, methods=["POST"]),
        Route("/api/repos/delete", repos.delete_repo, methods=["DELETE"]),
        Route("/api/{kind}", repos.list_repos),
        Route(api, repos.info),
        Route(f"{api}/settings", repos.settings, methods=["PUT"]),
        Route(f"{api}/revision/{{revision:reference}}", repos.info),
        Route(f"{api}/tree/{{revision:reference}}", repos.tree),
        Route(f"{api}/tree/{{revision:reference}}/{{path:file}}", repos.tree),
        Route(f"{api}/paths-info/{{revision:reference}}", repos.paths_info, methods=["POST"]),
        Route(f"{api}/commits/{{revision:reference}}", repos.commits),
        Route(f"{api}/refs", repos.refs),
        Route(f"{api}/branch/{{ref:reference}}", repos.branch, methods=["POST", "DELETE"]),
        Route(f"{api}/tag/{{ref:reference}}", repos.tag, methods=["POST", "DELETE"]),
        Route(f"{api}/preupload/{{revision:reference}}", commits.preupload, methods=["POST"]),
        Route(f"{api}/xet-write-token/{{revision:reference}}", commits.xet_token),
        Route(f"{api}/commit/{{revision:reference}}", commits.commit, methods=["POST"]),
        Route(f"{api}/discussions", commits.discussions, methods=["GET", "POST"]),
        Route(f"{api}/discussions/{{number:int}}", commits.discussion),
        Route(f"{api}/discussions/{{number:int}}/merge", commits.merge, methods=["POST"]),
        Route("/lfs/{oid}", commits.lfs_upload, methods=["PUT"]),
    ]
    for prefix in ("", "/datasets", "/spaces"):
        git = f"{prefix}/{{namespace}}/{{name}}"
        routes += [
            Route(f"{git}.git/info/lfs/objects/batch", commits.lfs_batch, methods=["POST"]),
            Route(f"{git}.git/info/lfs/verify", commits.lfs_verify, methods=["POST"]),
            Route(f"{git}/resolve/{{revision:reference}}/{{path:file}}", _of_kind(prefix, files.resolve)),
        ]
    app = Starlette(routes=routes, exception_handlers={HubAnswer: answer})
    app.state.hub = Hub(Storage(root), users, lfs_threshold)
    app.add_middleware(EncodedSlashes)
    return app


def _of_kind(prefix: str, handler):  # type: ignore[no-untyped-def]
    """The same handler for models and, under their prefix, data sets and spaces."""

    def handle(request: Request) -> Response:
        if prefix:
            request.path_params["kind"] = prefix.strip("/")
        return handler(request)

    return handle


class EncodedSlashes:
    """Keeps ``%2F`` inside a revision (``refs%2Fpr%2F1``) from splitting the path.

    While routes are matched it is a control character, which the convertors below turn back into a slash.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path", b"")
        if scope["type"] == "http" and b"%2f" in raw.lower():
            path = raw.decode("ascii").replace("%2F", "%1F").replace("%2f", "%1F")
            scope = {**scope, "path": unquote(path)}
        await self.app(scope, receive, send)
