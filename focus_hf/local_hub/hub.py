"""A Hub on disk: its repositories under one folder, and who may use it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from huggingface_hub.utils import HFValidationError, validate_repo_id

from .changes import is_device
from .http import Gone, HubAnswer
from .locks import WriteLock, claim
from .repository import KINDS, Repository

#: Names that mean something else at the start of a URL.
RESERVED = frozenset({"api", "lfs", *KINDS})

#: Files up to this size are committed directly, so that clients with hf_xet installed work as they are: for LFS files
#: such a client asks for a Xet store, which only the real Hub has. Adapters are far smaller than this.
LFS_THRESHOLD = 64 * 1024 * 1024

#: Where the owner's token is kept, in the Hub's folder; ``HF_TOKEN_PATH`` may name it.
TOKEN_FILE = "token"

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class User:
    """What one token stands for.

    Args:
        name: of the user, and of the namespace that is hers.
        role: a "read" token sees what the user sees, but changes nothing.
        everywhere: she may write in every namespace, and see everything.
    """

    name: str
    role: Literal["read", "write"] = "write"
    everywhere: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"A user cannot be named {self.name!r}.")
        if self.role not in ("read", "write"):
            raise ValueError(f'role must be "read" or "write", not {self.role!r}.')


#: Whose the Hub is where no users are named.
OWNER = User("demo", everywhere=True)


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(24)


def owner_token(root: str | os.PathLike[str]) -> str:
    """The token of a Hub's owner: made when the Hub first starts, and kept where only she can read it."""
    path = Path(root) / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or not path.read_text("ascii").strip():
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # readable by nobody else
        with os.fdopen(handle, "w") as file:
            file.write(new_token())
        os.replace(partial, path)
    return path.read_text("ascii").strip()


class Hub:
    """What every request handler needs: repositories as ``kind/namespace/name.git``, and users.

    Args:
        root: created if it does not exist.
        users: user by token; plain names stand for users who may read and write.
        lfs_threshold: files larger than this many bytes go through LFS instead of the commit itself.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        users: Mapping[str, str | User] | None = None,
        lfs_threshold: int = LFS_THRESHOLD,
    ) -> None:
        self.root = Path(root)
        self.users = {token: User(user) if isinstance(user, str) else user for token, user in (users or {}).items()}
        self.lfs_threshold = lfs_threshold
        self.secret = secrets.token_bytes(32)  # signs upload addresses
        self.staging = self.root / "staging"  # for what is not complete yet; on the same disk as the final places
        self.staging.mkdir(parents=True, exist_ok=True)
        self.lock = WriteLock(self.root / "writing")
        self._open: dict[Path, Repository] = {}
        self._opening = threading.Lock()
        with self.lock.held(self.staging):
            for path in self.staging.iterdir():
                _remove_if_abandoned(path)

    def close(self) -> None:
        with self._opening:
            for repository in self._open.values():
                repository.close()
            self._open.clear()

    def owns(self, user: User | None, repo_id: str) -> bool:
        """Whether a user's own tokens may read and write everything in a repository."""
        return user is not None and (user.everywhere or repo_id.split("/")[0] == user.name)

    def folder(self, kind: str, repo_id: str) -> Path:
        """Where a repository is or would be.

        Raises:
            HubAnswer: 400 for a name that no repository can have.
        """
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise HubAnswer(400, str(error)) from None
        if repo_id.count("/") != 1:
            raise HubAnswer(400, f"Repository names are namespace/name, got {repo_id!r}")
        if any(map(is_device, repo_id.split("/"))):
            raise HubAnswer(400, f"{repo_id!r} is the name of a device on Windows")
        if repo_id.split("/")[0].lower() in RESERVED:
            raise HubAnswer(400, f"The namespace of {repo_id!r} is reserved")
        return self.root / kind / f"{repo_id}.git"

    def find(self, kind: str, repo_id: str) -> Repository:
        """A repository; `Gone` if there is none of that name."""
        folder = self.folder(kind, repo_id)
        with self._opening:
            if not folder.is_dir():
                self._forget(folder)
                raise Gone
            if folder not in self._open:
                self._open[folder] = Repository(folder, kind, repo_id, self.lock)
            return self._open[folder]

    def names(self, kind: str) -> list[str]:
        base = self.root / kind
        return sorted(path.relative_to(base).as_posix().removesuffix(".git") for path in base.glob("*/*.git"))

    def create(self, kind: str, repo_id: str, author: str, *, private: bool) -> None:
        """Make a repository; it appears whole or not at all."""
        folder = self.folder(kind, repo_id)
        with self.lock.held(self.staging):
            if folder.exists():
                raise HubAnswer(409, f"You already created this {kind.rstrip('s')} repo")
            partial = Path(tempfile.mkdtemp(dir=self.staging))
            try:
                partial.chmod(0o755)
                made = Repository.create(partial, kind, repo_id, self.lock, author)
                made.write_meta({"private": private, "created": time.time()})
                made.close()
                folder.parent.mkdir(parents=True, exist_ok=True)
                os.rename(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def delete(self, kind: str, repo_id: str) -> None:
        """Remove a repository; it disappears whole or not at all, and in nobody's middle of writing to it."""
        with self.lock.held(self.staging):
            found = self.find(kind, repo_id)
            gone = Path(tempfile.mkdtemp(dir=self.staging))
            with self._opening:
                os.rename(found.folder, gone / "repository")
                self._forget(found.folder)
        shutil.rmtree(gone, ignore_errors=True)

    def _forget(self, folder: Path) -> None:
        if known := self._open.pop(folder, None):
            known.close()

    @contextmanager
    def upload(self) -> Iterator[IO[bytes]]:
        """A file for what arrives, removed at the end of the block, or if we die, by the next Hub that starts here."""
        with tempfile.NamedTemporaryFile(dir=self.staging, delete=False) as file:
            claim(file.fileno())
            os.chmod(file.name, 0o644)
            try:
                yield file
            finally:
                file.close()
                Path(file.name).unlink(missing_ok=True)


def _remove_if_abandoned(path: Path) -> None:
    """Remove what a process that died was about to move into place.

    Folders are filled and emptied under the write lock, which whoever calls this holds; files that arrive are claimed.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError), path.open("r+b") as file:
        if claim(file.fileno(), wait=False):
            path.unlink()
