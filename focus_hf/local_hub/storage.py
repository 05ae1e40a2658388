"""All repositories of a local Hub, under one folder."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from dulwich.repo import Repo
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .errors import HubAnswer
from .paths import is_device
from .repository import Repository
from .staging import Staging

#: Names that mean something else at the start of a URL.
RESERVED = frozenset({"api", "datasets", "lfs", "models", "spaces"})


class Storage:
    """Repositories as ``kind/namespace/name.git``.

    Args:
        root: created if it does not exist.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.staging = Staging(self.root / "staging")
        self._open: dict[Path, Repository] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            for repository in self._open.values():
                repository.close()
            self._open.clear()
            self.staging.close()

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

    def find(self, kind: str, repo_id: str) -> Repository | None:
        folder = self.folder(kind, repo_id)
        with self._lock:
            if not folder.is_dir():
                self._forget(folder)
                return None
            if folder not in self._open:
                self._open[folder] = Repository(folder)
            return self._open[folder]

    def create(self, kind: str, repo_id: str, author: str, *, private: bool) -> None:
        """Make a repository; it appears whole or not at all."""
        folder = self.folder(kind, repo_id)
        taken = HubAnswer(409, f"You already created this {kind.rstrip('s')} repo")
        if folder.exists():
            raise taken
        partial = self.staging.new_folder()
        try:
            Repo.init_bare(str(partial), default_branch=b"main").close()
            made = Repository(partial)
            made.create(author)
            made.write_meta({"private": private, "created": time.time()})
            made.close()
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(partial, folder)
        except OSError:
            if folder.exists():  # somebody was faster
                raise taken from None
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def delete(self, kind: str, repo_id: str) -> None:
        """Remove a repository; it disappears whole or not at all, and in nobody's middle of writing to it."""
        folder, found = self.folder(kind, repo_id), self.find(kind, repo_id)
        if found is None:
            raise HubAnswer(404, "Repository not found", code="RepoNotFound")
        gone = self.staging.new_folder()
        with found.lock.held(), self._lock:
            os.rename(folder, gone / "repository")
            self._forget(folder)
        shutil.rmtree(gone, ignore_errors=True)

    def list(self, kind: str) -> list[str]:
        base = self.root / kind
        return sorted(str(path.relative_to(base))[: -len(".git")] for path in base.glob("*/*.git"))

    def _forget(self, folder: Path) -> None:
        known = self._open.pop(folder, None)
        if known is not None:
            known.close()
