"""What a Hub says of repositories, and their files: read within bounds, and only as far as it makes sense."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, tqdm, validate_repo_id

from ..escape import shown
from ..files import written_atomically
from ..records.adapter_files import CONFIG_FILE
from .errors import HubError
from .files import LARGEST
from .patience import Patience
from .transfer import download, read_json, request

#: Repositories that a search looks at, and pages of them: more are no search any more.
LARGEST_SEARCH, MOST_PAGES = 10_000, 100

#: Bytes from which on a download shows a bar.
_SHOW_BAR_FROM = 5_000_000

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as far as the Hub says.

    Args:
        size: in bytes.
        sha256: of its content, for files in LFS.
        blob: git's name for its content: a hash of it.
    """

    size: int | None = None
    sha256: str | None = None
    blob: str | None = None

    def is_file(self, path: Path) -> bool:
        """Whether a file on this machine can be this one, by size and hash as far as the Hub states them."""
        if not path.is_file() or self.size not in (None, path.stat().st_size):
            return False
        if self.sha256 is None and self.blob is None:
            return True
        hashes = _hashes(path)
        return self.blob in hashes.values() if self.sha256 is None else self.sha256 == hashes["sha256"]


@dataclass(frozen=True)
class RemoteModel:
    """A model repository at one commit. What the Hub says in an unknown form is taken for not said.

    Args:
        repo_id: ``"org/name"``.
        commit: that all of this is about; empty where the Hub names none.
        files: by name.
        card: metadata of its card.
        tags: as the Hub derives them.
        downloads, likes: as the Hub counts them.
        updated: date of the last commit.
        private, gated: who may see it.
    """

    repo_id: str
    commit: str
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    downloads: int = 0
    likes: int = 0
    updated: str = ""
    private: bool = False
    gated: bool = False

    @classmethod
    def from_json(cls, said: Any) -> RemoteModel:
        """From the Hub's JSON.

        Raises:
            HubError: it does not say which repository it is about.
        """
        if not isinstance(said, dict):
            raise HubError(f"The Hub describes a repository by {shown(said)}, not by a mapping.")
        repo_id, commit, card = said.get("id"), said.get("sha"), said.get("cardData")
        if not isinstance(repo_id, str):
            raise HubError(f"The Hub names a repository {shown(repo_id)}.")
        validate_repo_id(repo_id)
        return cls(
            repo_id,
            commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else "",
            dict(filter(None, map(_file, _listed(said.get("siblings"))))),
            card if isinstance(card, dict) else {},
            [tag for tag in _listed(said.get("tags")) if isinstance(tag, str)],
            _count(said.get("downloads")) or 0,
            _count(said.get("likes")) or 0,
            _date(said.get("lastModified")),
            bool(said.get("private")),
            bool(said.get("gated")),
        )


def _file(said: Any) -> tuple[str, RemoteFile] | None:
    if not isinstance(said, dict) or not isinstance(said.get("rfilename"), str):
        return None
    lfs, size = said.get("lfs"), _count(said.get("size"))
    if isinstance(lfs, dict):  # git's name is that of the pointer then
        return said["rfilename"], RemoteFile(size, sha256=_hash(lfs.get("sha256") or lfs.get("oid")))
    return said["rfilename"], RemoteFile(size, blob=_hash(said.get("blobId")))


def _hash(value: Any) -> str | None:
    is_known = isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}", value)
    return str(value).lower() if is_known else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def strings(value: Any) -> list[str]:
    """The texts in what a card says, where one may stand for itself."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _date(value: Any) -> str:
    return value[:10] if isinstance(value, str) and re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value) else ""


def _hashes(path: Path) -> dict[str, str]:
    """Of a file's content, by every name that a Hub may give it; 40 or 64 digits."""
    content = path.read_bytes()
    found = {}
    for name, new in (("sha1", hashlib.sha1), ("sha256", hashlib.sha256)):
        found[name] = new(content).hexdigest()
        git = new(b"blob %d\0" % len(content))
        git.update(content)
        found[f"git {name}"] = git.hexdigest()
    return found


class HubReader:
    """Reads from one Hub on behalf of one command, which waits for it only so long.

    Args:
        api: endpoint and token.
        patience: that the command has, `patience.PATIENCE` by default.
    """

    def __init__(self, api: HfApi, patience: Patience | None = None) -> None:
        self.api, self.patience = api, patience or Patience()
        self._headers = build_hf_headers(token=api.token, library_name="focus_hf")
        counter = getattr(constants, "X_HF_DOWNLOAD_COUNTER", None)  # by which the Hub counts downloads
        self._file_headers = {**self._headers, **({counter: "1"} if counter else {})}

    def model(self, repo_id: str, revision: str | None = None) -> RemoteModel:
        """What the Hub says of a model.

        Raises:
            HubError: it says nothing that makes sense.
            HfHubHTTPError: it refused.
        """
        validate_repo_id(repo_id)
        url = f"{self.api.endpoint}/api/models/{repo_id}"
        url += f"/revision/{quote(revision, safe='')}" if revision else ""
        said = read_json(request("GET", f"{url}?blobs=true", self.patience, headers=self._headers))
        if isinstance(said, dict):
            said["id"] = repo_id  # whatever it calls itself: later requests are for what was asked for
        found = RemoteModel.from_json(said)
        if not found.commit:
            raise HubError(f"{self.api.endpoint} names no commit of {repo_id}: it cannot be read.")
        return found

    def models(self, query: Sequence[tuple[str, str]]) -> Iterator[Any]:
        """What a Hub says of the models that match, one after the other.

        Raises:
            HubError: it has no end.
        """
        url = f"{self.api.endpoint}/api/models?" + "&".join(f"{quote(k)}={quote(v, safe='')}" for k, v in query)
        seen = 0
        for _ in range(MOST_PAGES):
            answer = request("GET", url, self.patience, headers=self._headers)
            page = read_json(answer)
            if not isinstance(page, list):
                raise HubError(f"{self.api.endpoint} answered a search with {shown(page)}, not with a list.")
            for said in page:
                seen += 1
                if seen > LARGEST_SEARCH:
                    raise HubError(f"The search finds more than {LARGEST_SEARCH:,} repositories: narrow it down.")
                yield said
            following = answer.links.get("next", {}).get("url")
            if not following or not page:
                return
            url = following
        raise HubError(f"The search has more than {MOST_PAGES} pages: narrow it down.")

    def part(self, model: RemoteModel, name: str, first: int, length: int) -> bytes:
        """Some bytes of a file; fewer where it ends. No more is read of a server that sends all of it."""
        stop = first + length
        headers = {**self._headers, "Range": f"bytes={first}-{stop - 1}"}
        answer = request("GET", self.url(model, name), self.patience, headers=headers, enough=stop)
        return bytes(answer.content[0 if answer.status_code == 206 else first :][:length])

    def text(self, url: str, largest: int) -> str:
        """A small file as text, whatever bytes it holds."""
        answer = request("GET", url, self.patience, headers=self._file_headers, largest=largest)
        return str(answer.content.decode("utf-8", "replace"))

    def is_focus(self, model: RemoteModel) -> bool:
        """Whether a repository holds a Focus adapter, by its configuration."""
        if not model.commit or CONFIG_FILE not in model.files:
            return False
        try:
            url = self.url(model, CONFIG_FILE)
            said = read_json(
                request("GET", url, self.patience, headers=self._file_headers, largest=LARGEST[CONFIG_FILE])
            )
        except (HubError, HfHubHTTPError):  # not JSON, or gated
            if self.patience.over:
                raise
            return False
        return isinstance(said, dict) and said.get("peft_type") == "FOCUS"

    def keep(self, model: RemoteModel, name: str, largest: int) -> Path:
        """Put a file into the cache, as it should be, unless it is there already.

        Raises:
            HubError: what arrives is another file than the one that was announced.
        """
        path, wanted = snapshot(model) / name, model.files[name]
        if path.is_symlink() and not path.resolve().is_relative_to(Path(constants.HF_HUB_CACHE).resolve()):
            path.unlink()  # a link out of the cache, as a server can make the library lay it
        elif wanted.is_file(path):
            return path
        if wanted.size is not None and wanted.size > largest:
            raise HubError(f"{name} of {model.repo_id} has {wanted.size:,} bytes, more than {largest:,}.")
        with written_atomically(path) as file:
            self._download(model, name, file, largest)
            if not wanted.is_file(Path(file.name)):
                raise HubError(
                    f"{self.api.endpoint} sends a {name} of {model.repo_id} that is not the one it announced: "
                    "it is not used."
                )
        return path

    def _download(self, model: RemoteModel, name: str, file: BinaryIO, largest: int) -> None:
        size = model.files[name].size
        is_short = (size or 0) < _SHOW_BAR_FROM
        with tqdm(desc=name, total=size, unit="B", unit_scale=True, disable=is_short or None) as bar:
            download(
                self.url(model, name),
                file,
                self.patience,
                headers=self._file_headers,
                largest=largest,
                progress=bar.update,
            )
        file.flush()

    def url(self, model: RemoteModel, name: str) -> str:
        """Address of a file."""
        return hf_hub_url(model.repo_id, name, revision=model.commit, endpoint=self.api.endpoint)


# -- the cache -----------------------------------------------------------------------------------------------------
# In the layout that huggingface_hub documents, so that stock loaders find what was pulled. Files lie in the snapshot
# itself, as they do where links are not supported: a blob's name would be the server's word (its ETag).


def cache_folder(repo_id: str) -> Path:
    """What the cache holds of a model."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")


def snapshot(model: RemoteModel) -> Path:
    """The folder in the cache that holds the files of a commit."""
    return cache_folder(model.repo_id) / "snapshots" / model.commit


def note_revision(model: RemoteModel, revision: str | None) -> None:
    """Let the cache know which commit a branch or tag stands for, for when it is asked offline."""
    name = revision or constants.DEFAULT_REVISION
    if name != model.commit and ".." not in name.split("/") and not os.path.isabs(name):
        path = cache_folder(model.repo_id) / "refs" / name
        with written_atomically(path) as file:
            file.write(model.commit.encode())
