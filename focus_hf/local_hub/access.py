"""Who asks, and what they may see and do.

Private repositories do not exist for others: they get the answer that they would get for a name nobody has taken.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from starlette.requests import Request

from .errors import HubAnswer
from .repository import Repository
from .storage import Storage
from .users import User

#: URL segment and storage folder of each repository type.
KINDS = ("models", "datasets", "spaces")


@dataclass(frozen=True)
class Hub:
    """What every request handler needs.

    Args:
        storage: the repositories.
        users: user by token.
        lfs_threshold: files larger than this many bytes go through LFS instead of the commit itself.
        secret: signs upload addresses.
    """

    storage: Storage
    users: dict[str, User]
    lfs_threshold: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def owns(self, user: User | None, repo_id: str) -> bool:
        """Whether a user's own tokens may read and write everything in a repository."""
        if user is None:
            return False
        return user.everywhere or repo_id.split("/")[0] == user.name


def hub(request: Request) -> Hub:
    return request.app.state.hub


def visitor(request: Request) -> User | None:
    """The user a request comes from, ``None`` if it carries no token.

    Raises:
        HubAnswer: 401 for a token that is not known.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return None
    user = hub(request).users.get(token)
    if user is None:
        raise HubAnswer(401, "Invalid credentials in Authorization header")
    return user


def writer(request: Request) -> User:
    """Like `visitor`, but a token is required that may write."""
    user = visitor(request)
    if user is None:
        raise HubAnswer(401, "Invalid username or password.")
    if user.role != "write":
        raise HubAnswer(403, "Forbidden: you must use a write token to upload to a repository.")
    return user


@dataclass(frozen=True)
class Target:
    """The repository that a request is about, and who asks."""

    kind: str
    repo_id: str
    repository: Repository
    user: User | None
    owned: bool

    @property
    def path(self) -> str:
        """Of the repository's page."""
        return f"/{self.repo_id}" if self.kind == "models" else f"/{self.kind}/{self.repo_id}"

    def check_write(self, message: str | None = None) -> None:
        if not self.owned:
            raise HubAnswer(403, message or f"Forbidden: you don't have write access to {self.repo_id}.")

    def check_files(self) -> None:
        """Refuse the files of a gated repository to who has no access to them."""
        meta = self.repository.meta()
        if not meta["gated"] or self.owned:
            return
        subject = f"{self.kind.rstrip('s')} {self.repo_id}"
        if self.user is None:
            raise HubAnswer(
                401,
                f"Access to {subject} is restricted. You must have access to it and be authenticated to access it. "
                "Please log in.",
                code="GatedRepo",
            )
        if self.user.name not in meta["access"]:
            reason = f"Access to {subject} is restricted and you are not in the authorized list. Ask its authors."
            raise HubAnswer(403, reason, code="GatedRepo")


def kind_of(request: Request) -> str:
    """Type of repository that a URL names; pages and downloads of models have no prefix."""
    kind = request.path_params.get("kind") or request.url.path.split("/")[1]
    if kind in KINDS:
        return kind
    if "kind" in request.path_params:
        raise HubAnswer(404, "Not found")
    return "models"


def target(request: Request) -> Target:
    """The repository that a URL names, if the visitor may see it."""
    repo_id = f"{request.path_params['namespace']}/{request.path_params['name']}"
    return find(request, kind_of(request), repo_id, visitor(request))


def find(request: Request, kind: str, repo_id: str, user: User | None) -> Target:
    """A repository, if a user may see it."""
    here = hub(request)
    try:
        found = here.storage.find(kind, repo_id)
    except HubAnswer:  # a name that none can have
        found = None
    owned = here.owns(user, repo_id)
    if found is None or (not owned and found.meta()["private"]):
        if user is None:
            raise HubAnswer(401, "Invalid username or password.", code="RepoNotFound")
        raise HubAnswer(404, "Repository not found", code="RepoNotFound")
    return Target(kind, repo_id, found, user, owned)


def writable(request: Request, message: str | None = None) -> tuple[Target, User]:
    """Like `target`, but only who may write gets it.

    Args:
        request: the request.
        message: what to say to those who may only read.
    """
    user, found = writer(request), target(request)
    found.check_write(message)
    return found, user
