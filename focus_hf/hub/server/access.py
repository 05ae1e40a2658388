"""Who asks, and what they may see."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from .errors import HubAnswer
from .storage import Repository, Storage

#: URL segment and storage folder of each repository type.
KINDS = ("models", "datasets", "spaces")


@dataclass(frozen=True)
class Hub:
    """What every request handler needs.

    Args:
        storage: the repositories.
        users: user name by token; ``None`` accepts any token, as user "demo".
        lfs_threshold: files larger than this many bytes go through LFS instead of the commit itself.
    """

    storage: Storage
    users: dict[str, str] | None
    lfs_threshold: int


def hub(request: Request) -> Hub:
    return request.app.state.hub


def user(request: Request) -> str | None:
    """The user a request comes from, ``None`` if it carries no token.

    Raises:
        HubAnswer: 401 for a token that is not known.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return None
    users = hub(request).users
    if users is None:
        return "demo"
    if token not in users:
        raise HubAnswer(401, "Invalid user token.")
    return users[token]


def writer(request: Request) -> str:
    """Like `user`, but a token is required."""
    name = user(request)
    if name is None:
        raise HubAnswer(401, "Invalid username or password: writing needs a token.")
    return name


def repository(request: Request) -> tuple[str, str, Repository]:
    """Kind, id and repository that a URL names; private ones do not exist for strangers."""
    kind = request.path_params.get("kind", "models")
    if kind not in KINDS:
        raise HubAnswer(404, "Not found")
    repo_id = f"{request.path_params['namespace']}/{request.path_params['name']}"
    found = hub(request).storage.get(kind, repo_id)
    if hub(request).storage.meta(kind, repo_id)["private"] and user(request) is None:
        raise HubAnswer(401, "Repository not found", code="RepoNotFound")
    return kind, repo_id, found
