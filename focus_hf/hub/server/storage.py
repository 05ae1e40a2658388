"""Repositories on disk: real bare git repositories, LFS objects beside them, a little JSON for the rest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulwich.index import commit_tree
from dulwich.object_store import iter_tree_contents
from dulwich.objects import Blob, Commit, ObjectID
from dulwich.repo import Repo
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .errors import HubAnswer

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
_POINTER_START = b"version https://git-lfs.github.com/spec/v1\n"
_AUTHOR = b"focus-hf local hub <hub@localhost>"


@dataclass(frozen=True)
class Entry:
    """One file of a commit; ``lfs`` holds the sha256 of the content if git holds only a pointer to it."""

    path: str
    blob_id: str
    size: int
    lfs: str | None = None


class Repository:
    """One repository; every change is a commit that appears at once or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git = Repo(str(folder))
        self._lock = threading.Lock()

    # -- reading ---------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """The commit of a branch, tag, pull request (``refs/pr/N``) or commit hash."""
        names = [f"refs/heads/{revision}", f"refs/tags/{revision}", revision if revision.startswith("refs/") else ""]
        for name in filter(None, names):
            commit = self.refs().get(name)
            if commit is not None:
                return commit
        if len(revision) == 40 and ObjectID(revision.encode()) in self.git.object_store:
            return revision
        raise HubAnswer(404, f"Invalid rev id: {revision}", code="RevisionNotFound")

    def files(self, commit: str) -> dict[str, Entry]:
        """All files of a commit by path."""
        tree = self._commit(commit).tree
        entries = {}
        for item in iter_tree_contents(self.git.object_store, tree):
            path, data = item.path.decode(), self.git.object_store[item.sha].as_raw_string()
            pointer = _read_pointer(data)
            oid, size = pointer if pointer else (None, len(data))
            entries[path] = Entry(path, item.sha.decode(), size, oid)
        return entries

    def entry(self, commit: str, path: str) -> Entry:
        found = self.files(commit).get(path)
        if found is None:
            raise HubAnswer(404, f"Entry not found: {path}", code="EntryNotFound")
        return found

    def read(self, entry: Entry) -> bytes:
        """Content of a file that git itself holds."""
        return self.git.object_store[ObjectID(entry.blob_id.encode())].as_raw_string()

    def history(self, commit: str) -> Iterator[Commit]:
        for walked in self.git.get_walker(include=[ObjectID(commit.encode())]):
            yield walked.commit

    def refs(self) -> dict[str, str]:
        return {name.decode(): commit.decode() for name, commit in self.git.refs.as_dict().items() if name != b"HEAD"}

    def _commit(self, commit: str) -> Commit:
        found = self.git.object_store[ObjectID(commit.encode())]
        if not isinstance(found, Commit):
            raise HubAnswer(404, f"Invalid rev id: {commit}", code="RevisionNotFound")
        return found

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit(
        self,
        ref: str,
        changes: dict[str, bytes | None],
        deleted_folders: list[str],
        message: str,
        parent: str | None = None,
    ) -> str:
        """Apply changes on top of a branch.

        Args:
            ref: full name, such as ``refs/heads/main``.
            changes: content by path; ``None`` deletes.
            deleted_folders: folders to delete whole.
            message: of the commit.
            parent: the commit that the caller saw; if the branch has moved since, nothing happens.

        Raises:
            HubAnswer: 412 if the branch is not at ``parent``.
        """
        with self._lock:
            head = self.resolve(ref)
            if parent is not None and parent != head:
                raise HubAnswer(
                    412, f"The expected parent commit was {parent}, but the branch has moved on to {head}."
                )
            kept = {path: entry.blob_id.encode() for path, entry in self.files(head).items()}
            for folder in deleted_folders:
                kept = {path: sha for path, sha in kept.items() if not path.startswith(folder.rstrip("/") + "/")}
            for path, content in changes.items():
                if content is None:
                    kept.pop(path, None)
                    continue
                blob = Blob.from_string(content)
                self.git.object_store.add_object(blob)
                kept[path] = blob.id
            return self._store_commit(ref, kept, message, head)

    def create(self) -> None:
        """The first, empty commit on ``main``."""
        blob = Blob.from_string(_GITATTRIBUTES)
        self.git.object_store.add_object(blob)
        self._store_commit("refs/heads/main", {".gitattributes": blob.id}, "initial commit", None)

    def set_ref(self, ref: str, commit: str) -> None:
        if not self.git.refs.add_if_new(ref.encode(), ObjectID(commit.encode())):  # type: ignore[arg-type]
            raise HubAnswer(409, f"Reference already exists: {ref}")

    def delete_ref(self, ref: str) -> None:
        if ref not in self.refs():
            raise HubAnswer(404, f"Reference does not exist: {ref}", code="RevisionNotFound")
        self.git.refs.remove_if_equals(ref.encode(), None)  # type: ignore[arg-type]

    def merge(self, source: str, target: str, message: str) -> str:
        """Apply a pull request's changes to a branch; refused if the branch changed one of the same files."""
        ours, theirs = self.resolve(target), self.resolve(source)
        base = next((c.id.decode() for c in self.history(theirs) if c.id.decode() in self._ancestors(ours)), None)
        before = self.files(base) if base else {}
        after, current = self.files(theirs), self.files(ours)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        conflicts = sorted(path for path in changed if before.get(path) != current.get(path))
        if conflicts:
            raise HubAnswer(409, f"Cannot merge, files changed on both sides: {', '.join(conflicts)}")
        contents = {path: self.read(after[path]) if path in after else None for path in changed}
        return self.commit(target, contents, [], message)

    def _ancestors(self, commit: str) -> set[str]:
        return {c.id.decode() for c in self.history(commit)}

    def _store_commit(self, ref: str, blobs: dict[str, bytes], message: str, parent: str | None) -> str:
        entries = [(path.encode(), ObjectID(sha), 0o100644) for path, sha in blobs.items()]
        commit = Commit()
        commit.tree = commit_tree(self.git.object_store, entries)
        commit.parents = [ObjectID(parent.encode())] if parent else []
        commit.author = commit.committer = _AUTHOR
        commit.author_time = commit.commit_time = int(time.time())
        commit.author_timezone = commit.commit_timezone = 0
        commit.encoding = b"UTF-8"
        commit.message = message.encode()
        self.git.object_store.add_object(commit)
        name: Any = ref.encode()
        moved = (
            self.git.refs.set_if_equals(name, ObjectID(parent.encode()), commit.id)
            if parent
            else self.git.refs.add_if_new(name, commit.id)
        )
        if not moved:
            raise HubAnswer(412, f"The branch {ref} has moved meanwhile.")
        return commit.id.decode()


_GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.bin filter=lfs diff=lfs merge=lfs -text\n"


def _read_pointer(data: bytes) -> tuple[str, int] | None:
    if len(data) > 200 or not data.startswith(_POINTER_START):
        return None
    fields = dict(line.split(" ", 1) for line in data.decode().splitlines())
    return fields["oid"].removeprefix("sha256:"), int(fields["size"])


class LfsStore:
    """Large files by the sha256 of their content."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, oid: str) -> Path:
        if len(oid) != 64 or any(c not in "0123456789abcdef" for c in oid):
            raise HubAnswer(422, f"Not a sha256: {oid}")
        return self.root / oid[:2] / oid[2:4] / oid

    def has(self, oid: str) -> bool:
        return self.path(oid).is_file()

    async def receive(self, oid: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an upload; refused, and nothing kept, if its content is not what its name says."""
        target = self.path(oid)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{oid}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}.part")
        digest = hashlib.sha256()
        try:
            with partial.open("wb") as file:
                async for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != oid:
                raise HubAnswer(422, f"The uploaded content has sha256 {digest.hexdigest()}, not {oid}.")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


class Storage:
    """All repositories of a local Hub, under one folder.

    Args:
        root: created if it does not exist.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.lfs = LfsStore(self.root / "lfs")
        self._open: dict[tuple[str, str], Repository] = {}
        self._lock = threading.RLock()

    def folder(self, kind: str, repo_id: str) -> Path:
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise HubAnswer(400, str(error)) from None
        if repo_id.count("/") != 1:
            raise HubAnswer(400, f"Repository names are namespace/name, got {repo_id!r}")
        return self.root / kind / f"{repo_id}.git"

    def get(self, kind: str, repo_id: str) -> Repository:
        with self._lock:
            if (kind, repo_id) not in self._open:
                folder = self.folder(kind, repo_id)
                if not folder.is_dir():
                    raise HubAnswer(404, "Repository not found", code="RepoNotFound")
                self._open[kind, repo_id] = Repository(folder)
            return self._open[kind, repo_id]

    def create(self, kind: str, repo_id: str, private: bool) -> None:
        with self._lock:
            folder = self.folder(kind, repo_id)
            if folder.exists():
                raise HubAnswer(409, "You already created this repository", extra={"url": f"/{repo_id}"})
            partial = folder.with_suffix(".new")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that died here
            partial.mkdir(parents=True)
            Repo.init_bare(str(partial), default_branch=b"main").close()
            Repository(partial).create()
            self._write_meta(partial, {"private": private, "created": time.time(), "downloads": 0, "discussions": []})
            os.replace(partial, folder)

    def delete(self, kind: str, repo_id: str) -> None:
        with self._lock:
            repository = self.get(kind, repo_id)
            repository.git.close()
            del self._open[kind, repo_id]
            shutil.rmtree(repository.folder)

    def list(self, kind: str) -> list[str]:
        base = self.root / kind
        return sorted(str(path.relative_to(base))[: -len(".git")] for path in base.glob("*/*.git"))

    def meta(self, kind: str, repo_id: str) -> dict[str, Any]:
        return json.loads((self.get(kind, repo_id).folder / "focus-hub.json").read_text(encoding="utf-8"))

    def update_meta(self, kind: str, repo_id: str, **changes: Any) -> dict[str, Any]:
        with self._lock:
            meta = {**self.meta(kind, repo_id), **changes}
            self._write_meta(self.get(kind, repo_id).folder, meta)
            return meta

    def count_download(self, kind: str, repo_id: str) -> None:
        with self._lock:
            self.update_meta(kind, repo_id, downloads=self.meta(kind, repo_id)["downloads"] + 1)

    @staticmethod
    def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
        partial = folder / f"focus-hub.{threading.get_ident()}.part"
        partial.write_text(json.dumps(meta), encoding="utf-8")
        os.replace(partial, folder / "focus-hub.json")
