"""A Hub on disk: its repositories under one folder, and who may use it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from huggingface_hub.utils import HFValidationError, validate_repo_id

from .changes import is_device
from .http import Gone, HubAnswer
from .repository import KINDS, Repository

try:
    import fcntl
except ImportError:  # Windows: one server at a time is up to the user there
    fcntl = None  # type: ignore[assignment]

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


def owner_token(root: str | os.PathLike[str]) -> str:
    """The token of a Hub's owner: made when the Hub first starts, and kept where only she can read it."""
    path = Path(root) / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or not path.read_text("ascii").strip():
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # readable by nobody else
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(24))
        os.replace(partial, path)
    return path.read_text("ascii").strip()


class Hub:
    """What every request handler needs: repositories as ``kind/namespace/name.git``, users by token, and who writes.

    Its arguments are those of `create_app`.
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
        self._open: dict[Path, Repository] = {}
        self._opening = threading.Lock()
        self._threads, self._writing = threading.RLock(), False
        self._alive = os.open(self.root / "alive", os.O_RDWR | os.O_CREAT, 0o644)
        if _claim(self._alive, wait=False):  # nobody else serves this folder: what is staged is of processes that died
            for path in self.staging.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        _claim(self._alive, shared=True)

    def close(self) -> None:
        with self._opening:
            for repository in self._open.values():
                repository.close()
            self._open.clear()
        os.close(self._alive)

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Write to a folder inside the block, as the only thread and process that does; it may be entered again.

        The lock's file names the folder for as long as somebody writes: a name that is found there is that of a writer
        that died in the middle, and what it left is removed.
        """
        with self._threads:
            if self._writing:
                yield
                return
            file = os.open(self.root / "writing", os.O_RDWR | os.O_CREAT, 0o644)
            _claim(file)
            try:
                if left := os.read(file, 4096):
                    _tidy(self.root / os.fsdecode(left))
                    os.ftruncate(file, 0)
                    os.lseek(file, 0, os.SEEK_SET)
                os.write(file, os.fsencode(folder.relative_to(self.root)))
                self._writing = True
                yield
            except OSError:  # a full disk can leave behind what a writer that died does
                _tidy(folder)
                raise
            finally:
                self._writing = False
                os.ftruncate(file, 0)
                os.close(file)

    def folder(self, kind: str, repo_id: str) -> Path:
        """Where a repository is or would be; a 400 for a name that none can have."""
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
                self._open[folder] = Repository(folder, kind, repo_id, self.writing)
            return self._open[folder]

    def names(self, kind: str) -> list[str]:
        base = self.root / kind
        return sorted(path.relative_to(base).as_posix().removesuffix(".git") for path in base.glob("*/*.git"))

    def create(self, kind: str, repo_id: str, author: str, *, private: bool) -> None:
        """Make a repository; it appears whole or not at all."""
        folder = self.folder(kind, repo_id)
        with self.writing(self.staging), TemporaryDirectory(dir=self.staging) as partial:
            if folder.exists():
                raise HubAnswer(409, f"You already created this {kind.removesuffix('s')} repo")
            made = Path(partial) / "repository"
            Repository.create(made, kind, repo_id, self.writing, author, private=private).close()
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(made, folder)

    def delete(self, kind: str, repo_id: str) -> None:
        """Remove a repository; it disappears whole or not at all, and in nobody's middle of writing to it."""
        with TemporaryDirectory(dir=self.staging, ignore_cleanup_errors=True) as gone, self.writing(self.staging):
            found = self.find(kind, repo_id)
            with self._opening:
                os.rename(found.folder, Path(gone) / "repository")
                self._forget(found.folder)

    def _forget(self, folder: Path) -> None:
        if known := self._open.pop(folder, None):
            known.close()


def _claim(file: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file for as long as it is open; ``False`` if another process has it and we do not wait.

    The operating system gives the lock back when its holder dies.
    """
    if fcntl is None:
        return wait
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _tidy(folder: Path) -> None:
    """Remove unfinished files of a writer: git's, and those of `write_atomically`."""
    for pattern in ("**/*.lock", ".*.json.*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
