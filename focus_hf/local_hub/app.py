"""The application: which request goes where."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import pull_requests as pulls
from . import routes_commits as commits
from . import routes_files as files
from . import routes_lfs as lfs
from . import routes_pages as pages
from . import routes_repos as repos
from . import routes_trees as trees
from .access import Hub
from .errors import HubAnswer, answer, out_of_space
from .hosts import OnlyKnownHosts
from .storage import Storage
from .users import OWNER, User, new_token, users_by_token

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

    regex = "(?s:.+)"


register_url_convertor("reference", ReferenceConvertor())
register_url_convertor("file", FileConvertor())

#: Files up to this size are committed directly, so that clients with hf_xet installed work as they are: for LFS files
#: such a client asks for a Xet store, which only the real Hub has. Adapters are far smaller than this.
LFS_THRESHOLD = 64 * 1024 * 1024


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
    handlers = {HubAnswer: answer, OSError: out_of_space}
    app = Starlette(routes=[*_api_routes(), *_routes()], exception_handlers=handlers)
    if users is None:
        users = {token or new_token(): OWNER}
    app.state.hub = Hub(Storage(root), users_by_token(users), lfs_threshold)
    app.add_middleware(EncodedSlashes)
    app.add_middleware(NoSniffing)
    app.add_middleware(OnlyKnownHosts, allowed=allow_hosts)
    return app


def _api_routes() -> list[Route]:
    api, delete, post, put = "/api/{kind}/{namespace}/{name}", ["DELETE"], ["POST"], ["PUT"]
    both = [*post, *delete]
    one = f"{api}/discussions/{{number:int}}"
    return [
        Route("/api/whoami-v2", repos.whoami),
        Route("/api/validate-yaml", repos.validate_yaml, methods=post),
        Route("/api/repos/create", repos.create_repo, methods=post),
        Route("/api/repos/delete", repos.delete_repo, methods=delete),
        Route("/api/{kind}", repos.list_repos),
        Route(api, repos.info),
        Route(f"{api}/settings", repos.settings, methods=put),
        Route(f"{api}/auth-check", repos.auth_check),
        Route(f"{api}/auth-check/{{write}}", repos.auth_check),
        Route(f"{api}/revision/{{revision:reference}}", repos.info),
        Route(f"{api}/tree/{{revision:reference}}", trees.tree),
        Route(f"{api}/tree/{{revision:reference}}/{{path:file}}", trees.tree),
        Route(f"{api}/paths-info/{{revision:reference}}", trees.paths_info, methods=post),
        Route(f"{api}/commits/{{revision:reference}}", trees.commits),
        Route(f"{api}/refs", trees.refs),
        Route(f"{api}/branch/{{ref:reference}}", trees.branch, methods=both),
        Route(f"{api}/tag/{{ref:reference}}", trees.tag, methods=both),
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
    for prefix in ("/datasets", "/spaces", ""):
        git = f"{prefix}/{{namespace}}/{{name}}"
        routes += [
            Route(f"{git}.git/info/lfs/objects/batch", lfs.lfs_batch, methods=["POST"]),
            Route(f"{git}/resolve/{{revision:reference}}/{{path:file}}", files.resolve),
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


class EncodedSlashes:
    """Keeps ``%2F`` inside a revision (``refs%2Fpr%2F1``) from splitting the path.

    While routes are matched it is a control character, which the convertors above turn back into a slash.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path", b"")
        if scope["type"] == "http" and b"%2f" in raw.lower():
            path = raw.decode("latin-1").replace("%2F", "%1F").replace("%2f", "%1F")
            scope = {**scope, "path": unquote(path)}
        await self.app(scope, receive, send)


class NoSniffing:
    """Tells browsers to take every answer for what it says it is, not for what it looks like."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, send_safely)
