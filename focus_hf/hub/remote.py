"""What a Hub says of repositories, and their files: read within bounds, and only as far as it makes sense."""

from __future__ import annotations

import fnmatch
import hashlib
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin

from huggingface_hub import HfApi, ModelCardData, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, tqdm, validate_repo_id
from huggingface_hub.utils.sha import git_hash

from ..escape import one_line, shown
from ..records.adapter_files import ADAPTER_FILES, CONFIG_FILE, RESULTS_FILE
from .bounds import Bounds, same_origin
from .errors import HubError, hub_errors

#: Files of an adapter: a figure for each kind of diagram and layer, at the very most.
MOST_FILES = 500

#: Bytes of a file: configurations have one or two thousand, results and cards with every benchmark some hundred
#: thousand, reports on a hundred layers and large figures some millions.
LARGEST_FILE = 64 * 1024 * 1024
LARGEST = {
    **dict.fromkeys((CONFIG_FILE, "config.json"), 1024 * 1024),
    RESULTS_FILE: 8 * 1024 * 1024,
    "README.md": 4 * 1024 * 1024,
}

#: Repositories that a search looks at, and pages of them: more are no search any more.
LARGEST_SEARCH, MOST_PAGES = 10_000, 100

#: Bytes from which on a download shows a bar.
_SHOW_BAR_FROM = 5_000_000

#: What a reader of a damaged adapter can do.
AGAIN = "ask its author to push it again."

#: Of a commit, of a file's content.
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

#: Names that are the same file on every system; no part of them leads elsewhere or means a device.
_NAME = re.compile(r"(figures/)?(?!(?i:con|prn|aux|nul|(com|lpt)[0-9])\b)[^\W_][\w. +()-]{0,200}")


def adapter_files(folder: Path) -> list[str]:
    """Files of a folder that belong to an adapter.

    Links may lead to files of the folder itself, or, in the Hub's cache, to where it keeps contents; others could lead
    anywhere and are left out.
    """
    repository = folder.resolve().parent.parent
    homes = [folder.resolve(), repository / "blobs", repository.parent / "blobs"]
    found = [path for path in folder.rglob("*") if path.is_file() and any(map(path.resolve().is_relative_to, homes))]
    return sorted(filter(_belongs, (path.relative_to(folder).as_posix() for path in found)))


def copy_adapter(source: Path, target: Path) -> None:
    """Copy an adapter's files, and nothing else that lies beside them, into a folder that is there."""
    for name in adapter_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def remote_files(names: Iterable[str], source: str) -> list[str]:
    """Names in a repository's listing that belong to an adapter and can be a file on any machine; `HubError` if they
    are more than an adapter has."""
    found = sorted(name for name in names if _belongs(name) and _NAME.fullmatch(name))
    if len(found) > MOST_FILES:
        raise HubError(f"{source} lists {len(found):,} files of an adapter, more than {MOST_FILES}: it is not read.")
    return found


def _belongs(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ADAPTER_FILES)


def check_model(info: ModelInfo) -> None:
    """Raise `HubError` if what a Hub says of a model has other types than the library expects, where it matters."""
    found = info.siblings or ()
    try:
        validate_repo_id(info.id)
        hashes = [info.sha, *(file.blob_id for file in found), *(file.lfs.sha256 for file in found if file.lfs)]
        sizes = [info.downloads, info.likes, *(file.size for file in found)]
        is_sound = (
            all(isinstance(name, str) for name in (*(info.tags or ()), *files(info)))
            and all(size is None or is_size(size) for size in sizes)
            and all(value is None or _HASH.fullmatch(value) for value in hashes)
        )
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise HubError(f"The Hub describes {shown(info.id)} by names, sizes or hashes that cannot be.")


def files(info: ModelInfo) -> dict[str, RepoSibling]:
    """The files of a repository by name."""
    return {file.rfilename: file for file in info.siblings or ()}


def card(info: ModelInfo) -> ModelCardData:
    """The metadata of a repository's card, which may say anything under any name."""
    return info.card_data if isinstance(info.card_data, ModelCardData) else ModelCardData()


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_announced(path: Path, file: RepoSibling) -> bool:
    """Whether a file on this machine is what the Hub says, by size and hash as far as it states them."""
    content = path.read_bytes()
    if file.size not in (None, len(content)):
        return False
    if file.lfs is not None:  # git's name is that of the pointer then
        return hashlib.sha256(content).hexdigest() == file.lfs.sha256
    return file.blob_id in (None, git_hash(content))


class Hub:
    """Reads from one Hub on behalf of one command, which waits for it only so long.

    Args:
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.
        token: access token; the one of ``hf auth login`` by default.
        seconds: for which the command waits, see `Bounds`.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None, seconds: float | None = None) -> None:
        self.api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
        self.endpoint: str = self.api.endpoint
        self.bounds = Bounds(self.endpoint, seconds)

    def errors(self, repo_id: str) -> AbstractContextManager[None]:
        """Inside the block, the client's exceptions become `HubError`."""
        return hub_errors(repo_id, self.endpoint)

    def model(self, repo_id: str, revision: str | None = None) -> ModelInfo:
        """What the Hub says of a model; `HubError` if that makes no sense, `HfHubHTTPError` if it refuses."""
        validate_repo_id(repo_id)
        ask = partial(self.api.model_info, repo_id, revision=revision, files_metadata=True)
        try:
            found = self.bounds.run(ask)
        except HfHubHTTPError as error:  # the library tries searches and downloads again, and this not
            if error.response.status_code not in (429, 500, 502, 503, 504):
                raise
            time.sleep(1)
            found = self.bounds.run(ask)
        found.id = repo_id  # whatever the Hub calls it
        check_model(found)
        if not found.sha:
            raise HubError(f"{self.endpoint} names no commit of {repo_id}: it cannot be read.")
        return found

    def models(self, **query: Any) -> Iterator[Any]:
        """What a Hub says of the models that match, one after the other: `HfApi.list_models` ends at one odd card.
        `HubError` if it has no end, or goes on at another server."""
        seen, url = 0, f"{self.endpoint}/api/models?{urlencode(query, doseq=True)}"
        for _ in range(MOST_PAGES):
            page, following = self.bounds.run(partial(self._page, url))
            if not isinstance(page, list):
                raise HubError(f"{self.endpoint} answered a search with {shown(page)}, not with a list.")
            seen += len(page)
            if seen > LARGEST_SEARCH:
                raise HubError(f"The search finds more than {LARGEST_SEARCH:,} repositories: narrow it down.")
            yield from page
            if not following or not page:
                return
            url = following
        raise HubError(f"The search has more than {MOST_PAGES} pages: narrow it down.")

    def _page(self, url: str) -> tuple[Any, str | None]:
        """A page of a search, and where the next one is: on the same server, which the token is sent to."""
        headers = build_hf_headers(token=self.api.token, library_name="focus_hf")
        answer = http_backoff("GET", url, headers=headers, max_retries=3, retry_on_exceptions=())
        hf_raise_for_status(answer)
        if (following := answer.links.get("next", {}).get("url")) is None:
            return answer.json(), None
        if not same_origin(target := urljoin(url, following), self.endpoint):
            raise HubError(
                f"{self.endpoint} names {one_line(following)!r} as the next page of the search, which is not on the "
                "same server: it is not followed."
            )
        return answer.json(), target

    def fetch(self, model: ModelInfo, name: str, largest: int | None = None, revision: str | None = None) -> Path:
        """A file of a model in the library's cache, as it was announced.

        Args:
            largest: bytes; as in `LARGEST` by default.
            revision: branch or tag that the cache is to know the commit of, for when it is asked offline.

        Raises:
            HubError: it is not to be had, or what arrives is larger than, or another file than, what was announced.
        """
        wanted, bound = files(model)[name], largest or LARGEST.get(name, LARGEST_FILE)
        if wanted.size is not None and wanted.size > bound:
            raise HubError(f"{name} of {model.id} has {wanted.size:,} bytes, more than {bound:,}.")
        bound = bound if wanted.size is None else wanted.size
        download = partial(self.api.hf_hub_download, model.id, name, revision=revision or model.sha, tqdm_class=_Bar)
        for _ in range(2):  # what lies in the cache may be damaged
            with self.errors(model.id):
                path = Path(self.bounds.run(download, largest=bound, is_file=True))
            if str(model.sha) not in path.parts:
                raise HubError(f"{self.endpoint} gives {name} of another commit of {model.id}: try again.")
            home = Path(constants.HF_HUB_CACHE).resolve()
            if path.resolve().is_relative_to(home):  # a server can make the library lay a link out of it
                if is_announced(path, wanted):
                    return path
                path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise HubError(
            f"{self.endpoint} sends a {name} of {model.id} that is not the one it announced: it is not used."
        )

    def weights(self, model: ModelInfo, name: str) -> tuple[dict[str, tuple[int, ...]], int]:
        """Shapes by name in the header of a safetensors file, and the bytes that the file has at most; `HubError` if
        it is no such header."""

        def read() -> tuple[dict[str, tuple[int, ...]], list[int]]:
            header = self.api.parse_safetensors_file_metadata(model.id, name, revision=model.sha)
            tensors = header.tensors.items()
            return {key: tuple(info.shape) for key, info in tensors}, [info.data_offsets[1] for _, info in tensors]

        shapes, ends = self.bounds.run(read)
        if not all(len(shape) <= 4 and all(map(is_size, shape)) for shape in shapes.values()):
            raise HubError(f"{name} of {model.id} has tensors of sizes that cannot be; {AGAIN}")
        return shapes, max(filter(is_size, ends), default=0) + constants.SAFETENSORS_MAX_HEADER_LENGTH


class _Bar(tqdm):
    """The library's bar, for files that take a while."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": (options.get("total") or 0) < _SHOW_BAR_FROM or None})
