"""Who asks, and what they may see and do.

Private repositories do not exist for others: they get the answer that they would get for a name nobody has taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from .http import Gone, HubAnswer
from .hub import Hub, User
from .repository import Repository


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


def named_visitor(request: Request) -> User:
    """Like `visitor`, but a token is required."""
    user = visitor(request)
    if user is None:
        raise HubAnswer(401, "Invalid username or password.")
    return user


def writer(request: Request) -> User:
    """Like `visitor`, but a token is required that may write."""
    user = named_visitor(request)
    if user.role != "write":
        raise HubAnswer(403, "Forbidden: you must use a write token to upload to a repository.")
    return user


@dataclass(frozen=True)
class Target:
    """The repository that a request is about, and who asks."""

    repository: Repository
    user: User | None
    owned: bool

    def check_write(self, message: str | None = None) -> None:
        if not self.owned:
            raise HubAnswer(403, message or f"Forbidden: you don't have write access to {self.repository.id}.")

    def check_files(self) -> None:
        """Refuse the files of a gated repository to who has no access to them."""
        meta = self.repository.meta()
        if not meta["gated"] or self.owned:
            return
        subject = f"Access to {self.repository.type} {self.repository.id} is restricted"
        if self.user is None:
            message = f"{subject}. You must have access to it and be authenticated to access it. Please log in."
            raise HubAnswer(401, message, code="GatedRepo")
        if self.user.name not in meta["access"]:
            message = f"{subject} and you are not in the authorized list. Ask its authors."
            raise HubAnswer(403, message, code="GatedRepo")


def target(request: Request) -> Target:
    """The repository that a URL names, if the visitor may see it; pages and downloads of models name no kind."""
    names = request.path_params
    return find(request, names.get("kind", "models"), f"{names['namespace']}/{names['name']}")


def find(request: Request, kind: str, repo_id: str) -> Target:
    """A repository, if the visitor may see it."""
    here, user = hub(request), visitor(request)
    owned = here.owns(user, repo_id)
    try:
        found = here.find(kind, repo_id)
        if not owned and found.meta()["private"]:
            raise Gone
    except HubAnswer:  # there is none, or none can have this name
        if user is None:
            raise HubAnswer(401, "Invalid username or password.", code="RepoNotFound") from None
        raise Gone from None
    return Target(found, user, owned)


def writable(request: Request) -> Target:
    """Like `target`, but only who may write gets it."""
    writer(request)
    found = target(request)
    found.check_write()
    return found
