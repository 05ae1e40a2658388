"""One repository on disk: a bare git repository and a little JSON beside it."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from dulwich.errors import MissingCommitError
from dulwich.graph import find_merge_base
from dulwich.index import commit_tree
from dulwich.object_store import iter_tree_contents
from dulwich.objects import Blob, Commit, ObjectID
from dulwich.refs import Ref, check_ref_format
from dulwich.repo import Repo

from ..files import write_atomically
from ..front_matter import card_metadata
from .changes import Changes, Entry, read_pointer
from .http import Gone, HubAnswer, no_entry, no_revision

#: URL segment and storage folder of each repository type.
KINDS = ("models", "datasets", "spaces")

#: Write to a folder, as nobody else does.
Lock = Callable[[Path], AbstractContextManager[None]]

_META = "focus-hub.json"
_HASH = re.compile(r"[0-9a-f]{40}")
_GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.bin filter=lfs diff=lfs merge=lfs -text\n"


def is_at(commit: str, parent: str) -> bool:
    """Whether a client that names a commit, or at least 7 of its characters, means this one."""
    return len(parent) >= 7 and commit.startswith(parent)


class Repository:
    """One repository, by its kind and its id (namespace/name); a change appears at once or not at all.

    A commit first writes its files, then its tree, then itself, each under a temporary name that is renamed, and last
    moves the branch: whoever dies on the way leaves the branch where it was. Who writes holds the Hub's lock.
    """

    def __init__(self, folder: Path, kind: str, id: str, lock: Lock) -> None:
        self.folder, self.kind, self.id, self._lock = folder, kind, id, lock
        self.git = Repo(str(folder))
        # Otherwise the branch could reach the disk before the files it needs, and power fail in between.
        self.git.object_store.fsync_object_files = True
        self._closed = False
        # Content under a hash never changes.
        self._tree = lru_cache(maxsize=64)(self._read_tree)
        self._blob = lru_cache(maxsize=100_000)(self._read_blob)
        self._card = lru_cache(maxsize=1000)(self._read_card)

    @classmethod
    def create(cls, folder: Path, kind: str, id: str, lock: Lock, author: str, *, private: bool) -> Repository:
        """A new one in an empty folder, with its first commit on ``main``."""
        Repo.init_bare(str(folder), mkdir=True, default_branch=b"main").close()
        made = cls(folder, kind, id, lock)
        (folder / "lfs").mkdir()
        first = made._store_commit({".gitattributes": made.store_blob(_GITATTRIBUTES)}, "initial commit", author)
        made.add_ref("refs/heads/main", first)
        made._write_meta({"private": private, "created": time.time()})
        return made

    def close(self) -> None:
        """Let go of it: it is deleted, or the Hub ends. Who still holds it finds it `Gone`."""
        self._closed = True
        self.git.close()

    @property
    def type(self) -> str:
        """Its kind in the singular."""
        return self.kind.removesuffix("s")

    @property
    def path(self) -> str:
        """Of its page."""
        return f"/{self.id}" if self.kind == "models" else f"/{self.kind}/{self.id}"

    # -- reading ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is missing because the repository was deleted since it was found is `Gone`, not an error of ours."""
        try:
            yield
        except (KeyError, MissingCommitError, FileNotFoundError):
            if self._is_there():
                raise
            raise Gone from None

    def _is_there(self) -> bool:
        return not self._closed and self.folder.is_dir()

    def resolve(self, revision: str) -> str:
        """The commit of a branch, tag, pull request (``refs/pr/N``) or commit hash."""
        refs = self.refs()
        is_full = revision.startswith("refs/")  # and means nothing else, whatever a tag is called
        for name in [revision] if is_full else [f"refs/heads/{revision}", f"refs/tags/{revision}"]:
            if name in refs:
                return refs[name]
        if not self._is_there():
            raise Gone
        if _HASH.fullmatch(revision) and _id(revision) in self.git.object_store:
            self.describe_commit(revision)
            return revision
        raise no_revision(revision)

    def files(self, commit: str) -> dict[str, Entry]:
        """All files of a commit by path; not to be changed."""
        with self._reading():
            return self._tree(self.describe_commit(commit).tree)

    def entry(self, commit: str, path: str) -> Entry:
        found = self.files(commit).get(path)
        if found is None:
            raise no_entry(path)
        return found

    def read(self, entry: Entry) -> bytes:
        """Content of a file that git itself holds."""
        with self._reading():
            return self.git.object_store[_id(entry.blob_id)].as_raw_string()

    def history(self, commit: str) -> Iterator[Commit]:
        """A commit and what came before it, newest first."""
        with self._reading():
            for walked in self.git.get_walker([_id(commit)]):
                yield walked.commit

    def refs(self) -> dict[str, str]:
        return {name.decode(): commit.decode() for name, commit in self.git.refs.as_dict().items()}

    def card(self, commit: str) -> dict[str, Any]:
        """Metadata of the README of a commit; empty if there is none or it cannot be read."""
        readme = self.files(commit).get("README.md")
        return {} if readme is None or readme.lfs is not None else self._card(readme)

    def _read_card(self, readme: Entry) -> dict[str, Any]:
        try:
            return card_metadata(self.read(readme).decode("utf-8", "replace"))
        except ValueError:
            return {}

    def describe_commit(self, commit: str) -> Commit:
        with self._reading():
            found = self.git.object_store[_id(commit)]
        if not isinstance(found, Commit):
            raise no_revision(commit)
        return found

    def _read_tree(self, tree: ObjectID) -> dict[str, Entry]:
        return {item.path.decode(): self._blob(item.sha) for item in iter_tree_contents(self.git.object_store, tree)}

    def _read_blob(self, blob: ObjectID) -> Entry:
        data = self.git.object_store[blob].as_raw_string()
        oid, size = read_pointer(data) or (None, len(data))
        return Entry(blob.decode(), size, oid)

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else writes inside the block."""
        with self._lock(self.folder):
            if not self._is_there():
                raise Gone
            yield

    def store_blob(self, content: bytes) -> str:
        """Keep a file's content for a commit to come; without one it is never seen."""
        blob = Blob.from_string(content)
        with self.writing():
            self.git.object_store.add_object(blob)
        return blob.id.decode()

    def store_large(self, file: Path, oid: str) -> None:
        """Move a large file to its place; without a commit it is never seen."""
        with self.writing():
            file.replace(self.lfs_path(oid))

    def commit(
        self, ref: str, changes: Changes, message: str, author: str, parent: str | None = None, start: str = ""
    ) -> str:
        """Apply changes on top of a branch, given by its full name, such as ``refs/heads/main``.

        If the branch is no more at ``parent`` (see `is_at`), it is a 412. ``start`` is the commit from which a branch
        starts that does not exist yet.
        """
        with self.writing():
            head = start or self.resolve(ref)
            if parent is None or is_at(head, parent):
                kept = {path: entry.blob_id for path, entry in self.files(head).items()}
                changes.apply(kept)
                made = self._store_commit(kept, message, author, head)
                if start:
                    self.add_ref(ref, made)
                    return made
                if self.git.refs.set_if_equals(_ref(ref), _id(head), _id(made)):  # git itself holds no lock of ours
                    return made
        raise HubAnswer(412, "A commit has happened since. Please refresh and try again.")

    def add_ref(self, ref: str, commit: str) -> None:
        # A branch named like a commit would hide that commit, one named like a full reference that reference.
        short = ref.split("/", 2)[-1]
        if not check_ref_format(_ref(ref)) or _HASH.fullmatch(short) or short.startswith("refs/") or short == "HEAD":
            raise HubAnswer(400, f"Invalid reference name: {ref}")
        with self.writing():
            try:
                added = self.git.refs.add_if_new(_ref(ref), _id(commit))
            except OSError as error:  # git keeps a/b as a file in folder a, where branch a would be
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise HubAnswer(409, f"Reference {ref} cannot be made: {error.strerror}") from None
        if not added:
            raise HubAnswer(409, f"Reference already exists: {ref}")

    def delete_ref(self, ref: str) -> None:
        if ref == "refs/heads/main":
            raise HubAnswer(400, "The default branch cannot be deleted")
        with self.writing():
            if ref not in self.refs():
                raise HubAnswer(404, f"Reference does not exist: {ref}", code="RevisionNotFound")
            self.git.refs.remove_if_equals(_ref(ref), None)

    def conflicts(self, source: str, target: str) -> tuple[Changes, list[str]]:
        """What a pull request changes, and the files among it that the branch has changed since."""
        ours, theirs = self.resolve(target), self.resolve(source)
        with self._reading():
            base = find_merge_base(self.git, [_id(ours), _id(theirs)])
        before = self.files(base[0].decode()) if base else {}
        after, current = self.files(theirs), self.files(ours)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        clash = {path for path in changed if before.get(path) != current.get(path)}
        # The same change on both sides is no conflict, and there is nothing left to do about it.
        done = {path for path in clash if after.get(path) == current.get(path)}
        files = {path: after[path].blob_id if path in after else None for path in changed - done}
        return Changes(files), sorted(clash - done)

    def _store_commit(self, blobs: dict[str, str], message: str, author: str, parent: str | None = None) -> str:
        entries = [(path.encode(), _id(blob), 0o100644) for path, blob in blobs.items()]
        commit = Commit()
        commit.tree = commit_tree(self.git.object_store, entries)
        commit.parents = [_id(parent)] if parent else []
        commit.author = commit.committer = f"{author} <{author}@localhost>".encode()
        commit.author_time = commit.commit_time = int(time.time())
        commit.author_timezone = commit.commit_timezone = 0
        commit.encoding = b"UTF-8"
        commit.message = message.encode()
        self.git.object_store.add_object(commit)
        return commit.id.decode()

    # -- what git does not know ------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """Settings, who has access to gated files, downloads and pull requests."""
        with self._reading():
            known = json.loads((self.folder / _META).read_text(encoding="utf-8"))
        defaults = {"private": False, "gated": False, "downloads": 0, "access": [], "pull_requests": []}
        return {**defaults, **known}

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The same, to be changed inside the block; an exception leaves everything as it was."""
        with self.writing():
            meta = self.meta()
            yield meta
            self._write_meta(meta)

    def _write_meta(self, meta: dict[str, Any]) -> None:
        write_atomically(self.folder / _META, json.dumps(meta).encode())

    def lfs_path(self, oid: str) -> Path:
        """Where a large file is, or would be, by the sha256 of its content.

        Each repository keeps its own: a hash is not enough to read somebody else's private file.
        """
        if re.fullmatch("[0-9a-f]{64}", oid) is None:
            raise HubAnswer(422, f"Not a sha256: {oid}")
        return self.folder / "lfs" / oid


def _id(name: str) -> ObjectID:
    return ObjectID(name.encode())


def _ref(name: str) -> Ref:
    return Ref(name.encode("utf-8", "replace"))
