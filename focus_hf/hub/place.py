"""The repository and branch that a push goes to: what is there now, and what has to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling

from ..card.read import CARD
from .errors import HubError
from .remote import Hub, adapter_files, files, is_announced


@dataclass(frozen=True)
class Remote:
    """A repository as it is now.

    Args:
        commit: of the branch, or of ``main`` where the branch does not exist yet; ``None`` without a repository.
        card: its README.md.
        files: by name.
        is_public: everybody may see it.
        has_branch: the branch exists.
    """

    commit: str | None = None
    card: str | None = None
    files: Mapping[str, RepoSibling] = field(default_factory=dict)
    is_public: bool = False
    has_branch: bool = True


def look(hub: Hub, repo_id: str, revision: str | None) -> Remote:
    """What there is now; of a branch to be made, what it will start from."""
    try:
        model = hub.model(repo_id, revision)
    except RevisionNotFoundError:
        return replace(look(hub, repo_id, None), has_branch=False) if revision else Remote()
    except RepositoryNotFoundError as error:
        if type(error) is not RepositoryNotFoundError:  # gated: it is there
            raise
        return Remote()
    found = files(model)
    card = hub.fetch(model, CARD).read_text("utf-8", "replace") if CARD in found else None
    return Remote(model.sha, card, found, is_public=not model.private)


def stop_if_concerned(before: Remote | None, now: Remote, folder: Path, repo_id: str) -> None:
    """A push in between is no matter unless it made something else of a file that we send; cards are merged."""
    if before is None:
        return
    for name in adapter_files(folder):
        ours = name == CARD or (name in now.files and is_announced(folder / name, now.files[name]))
        if before.files.get(name) != now.files.get(name) and not ours:
            raise HubError(f"Somebody pushed {name} to {repo_id} meanwhile: look at the new version, then push again.")


@contextmanager
def place_for(api: HfApi, repo_id: str, remote: Remote, revision: str | None, private: bool) -> Iterator[str]:
    """The commit that a push follows; a repository or branch made for it is removed again if the push is refused."""
    made: Callable[[], object] | None = None
    if remote.commit is None:
        try:
            api.create_repo(repo_id, private=private)
            made = partial(api.delete_repo, repo_id)
        except HfHubHTTPError as error:
            if error.response.status_code != 409:  # somebody else has just made it
                raise
    try:
        parent = remote.commit or str(api.model_info(repo_id).sha)
        if revision is not None and (made or not remote.has_branch):
            api.create_branch(repo_id, branch=revision, revision=parent)
            made = made or partial(api.delete_branch, repo_id, branch=revision)
        yield parent
    except (HfHubHTTPError, ValueError):  # a broken connection is no refusal: what was sent may have arrived
        if made and api.model_info(repo_id, revision=revision).sha == parent:  # nobody else has used it
            made()
        raise
