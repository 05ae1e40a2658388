"""What a Hub says of repositories, and their files: read within bounds, and only as far as it makes sense."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urljoin

from huggingface_hub import HfApi, ModelCardData, ModelInfo, constants
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, tqdm, validate_repo_id
from huggingface_hub.utils.sha import git_hash

from ..escape import one_line, shown
from ..records.adapter_files import CONFIG_FILE, read_json
from .bounds import Bounds, same_origin
from .errors import HubError, hub_errors
from .files import LARGEST

#: Repositories that a search looks at, and pages of them: more are no search any more.
LARGEST_SEARCH, MOST_PAGES = 10_000, 100

#: Bytes from which on a download shows a bar.
_SHOW_BAR_FROM = 5_000_000

#: What a reader of a damaged adapter can do.
AGAIN = "ask its author to push it again."

#: Of a commit, of a file's content.
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def read_model(said: Any, repo_id: str | None = None) -> ModelInfo:
    """What a Hub says of a model, with nothing in it that has another type than the library expects.

    Args:
        said: the Hub's JSON.
        repo_id: what was asked for, whatever the Hub calls it.

    Raises:
        HubError: it makes no sense.
    """
    try:
        info = ModelInfo(**{**said, "id": repo_id or said["id"]})
        validate_repo_id(info.id)
        hashes = [file.blob_id for file in info.siblings or ()]
        hashes += [file.lfs.sha256 for file in info.siblings or () if file.lfs is not None]
        sizes = [file.size for file in info.siblings or ()]
        names = [info.id, *(info.tags or ()), *(file.rfilename for file in info.siblings or ())]
        is_sound = (
            all(isinstance(name, str) for name in names)
            and all(size is None or is_size(size) for size in (info.downloads, info.likes, *sizes))
            and all(value is None or HASH.fullmatch(value) for value in (info.sha, *hashes))
        )
    except Exception as error:  # the library's readers fail in many ways
        raise HubError(f"The Hub describes a repository in a way that makes no sense: {shown(error)}") from None
    if not is_sound:
        raise HubError(f"The Hub describes {info.id!r:.100} by names, sizes or hashes that cannot be.")
    return info


def files(info: ModelInfo) -> dict[str, RepoSibling]:
    """The files of a repository by name."""
    return {file.rfilename: file for file in info.siblings or ()}


def card(info: ModelInfo) -> ModelCardData:
    """The metadata of a repository's card, which may say anything under any name."""
    return info.card_data if isinstance(info.card_data, ModelCardData) else ModelCardData()


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def strings(value: Any) -> list[str]:
    """The texts in what a card says, where one may stand for itself."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


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
        api: endpoint and token.
        bounds: that the command has, `bounds.PATIENCE` by default.
    """

    def __init__(self, api: HfApi, bounds: Bounds | None = None) -> None:
        self.api, self.bounds = api, bounds or Bounds(api.endpoint)

    def model(self, repo_id: str, revision: str | None = None) -> ModelInfo:
        """What the Hub says of a model.

        Raises:
            HubError: it says nothing that makes sense.
            HfHubHTTPError: it refused.
        """
        validate_repo_id(repo_id)
        url = f"{self.api.endpoint}/api/models/{repo_id}"
        said, _ = self._ask(f"{url}/revision/{quote(revision, safe='')}" if revision else url, {"blobs": "true"})
        found = read_model(said, repo_id)
        if not found.sha:
            raise HubError(f"{self.api.endpoint} names no commit of {repo_id}: it cannot be read.")
        return found

    def models(self, query: Sequence[tuple[str, str]]) -> Iterator[Any]:
        """What a Hub says of the models that match, one after the other: `HfApi.list_models` ends at one odd card.

        Raises:
            HubError: it has no end, or goes on at another server.
        """
        seen, url = 0, f"{self.api.endpoint}/api/models?{urlencode(query)}"
        for _ in range(MOST_PAGES):
            page, following = self._ask(url)
            if not isinstance(page, list):
                raise HubError(f"{self.api.endpoint} answered a search with {shown(page)}, not with a list.")
            for said in page:
                seen += 1
                if seen > LARGEST_SEARCH:
                    raise HubError(f"The search finds more than {LARGEST_SEARCH:,} repositories: narrow it down.")
                yield said
            if not following or not page:
                return
            url = self._next_page(url, following)
        raise HubError(f"The search has more than {MOST_PAGES} pages: narrow it down.")

    def _next_page(self, url: str, following: str) -> str:
        """The address of the next page, on the same server: what is sent there carries the token."""
        try:
            target = urljoin(url, following)
            if same_origin(target, self.api.endpoint):
                return target
        except ValueError:
            pass
        raise HubError(
            f"{self.api.endpoint} names {one_line(following)!r} as the next page of the search, which is not on the "
            "same server: it is not followed."
        )

    def _ask(self, url: str, params: dict[str, str] | None = None) -> tuple[Any, str | None]:
        """JSON that the Hub answers with, and the address of the next page of it."""

        def ask() -> tuple[Any, str | None]:
            headers = build_hf_headers(token=self.api.token, library_name="focus_hf")
            answer = http_backoff("GET", url, params=params, headers=headers, max_retries=3, retry_on_exceptions=())
            hf_raise_for_status(answer)
            return answer.json(), answer.links.get("next", {}).get("url")

        return self.bounds.run(ask)

    def fetch(self, model: ModelInfo, name: str, largest: int, revision: str | None = None) -> Path:
        """A file in the library's cache, as it was announced.

        Args:
            model: whose file.
            name: which.
            largest: bytes.
            revision: branch or tag that the cache is to know the commit of, for when it is asked offline.

        Raises:
            HubError: it is not to be had, or what arrives is larger than, or another file than, what was announced.
        """
        wanted = files(model)[name]
        if wanted.size is not None and wanted.size > largest:
            raise HubError(f"{name} of {model.id} has {wanted.size:,} bytes, more than {largest:,}.")
        bound = largest if wanted.size is None else wanted.size

        def download() -> str:
            return self.api.hf_hub_download(model.id, name, revision=revision or model.sha, tqdm_class=_Bar)

        for _ in range(2):  # what lies in the cache may be damaged
            with hub_errors(model.id, self.api.endpoint):
                path = Path(self.bounds.run(download, largest=bound, is_file=True))
            if str(model.sha) not in path.parts:
                raise HubError(f"{self.api.endpoint} gives {name} of another commit of {model.id}: try again.")
            home = Path(constants.HF_HUB_CACHE).resolve()
            is_ours = path.resolve().is_relative_to(home)  # a server can make the library lay a link out of it
            if is_ours and is_announced(path, wanted):
                return path
            if is_ours:
                path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise HubError(
            f"{self.api.endpoint} sends a {name} of {model.id} that is not the one it announced: it is not used."
        )

    def weights(self, model: ModelInfo, name: str) -> tuple[dict[str, tuple[int, ...]], int]:
        """Shapes by name in the header of a safetensors file, and the bytes that the file has at most.

        Raises:
            HubError: it is not the header of a safetensors file.
        """

        def read() -> tuple[dict[str, tuple[int, ...]], list[int]]:
            header = self.api.parse_safetensors_file_metadata(model.id, name, revision=model.sha)
            tensors = header.tensors.items()
            return {key: tuple(info.shape) for key, info in tensors}, [info.data_offsets[1] for _, info in tensors]

        shapes, ends = self.bounds.run(read)
        if not all(len(shape) <= 4 and all(map(is_size, shape)) for shape in shapes.values()):
            raise HubError(f"{name} of {model.id} has tensors of sizes that cannot be; {AGAIN}")
        largest = max((end for end in ends if is_size(end)), default=0)
        return shapes, largest + constants.SAFETENSORS_MAX_HEADER_LENGTH

    def is_focus(self, model: ModelInfo) -> bool:
        """Whether a repository holds a Focus adapter, by its configuration."""
        if not model.sha or CONFIG_FILE not in files(model):
            return False
        try:
            said = read_json(self.fetch(model, CONFIG_FILE, LARGEST[CONFIG_FILE]))
        except (HubError, ValueError):  # not JSON, or gated
            if self.bounds.over:
                raise
            return False
        return isinstance(said, dict) and said.get("peft_type") == "FOCUS"


class _Bar(tqdm):
    """The library's bar, for files that take a while."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": (options.get("total") or 0) < _SHOW_BAR_FROM or None})
