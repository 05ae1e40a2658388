"""Pull an adapter: only its files, pinned to one commit, checked before and after."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.utils import SafetensorsFileMetadata, build_hf_headers, get_session, hf_raise_for_status

from ..records.adapter_files import (
    ADAPTER_FILES,
    CONFIG_FILE,
    RESULTS_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterFileError,
    check_adapter,
    check_tensors,
    names_a_folder,
    read_config,
    refuse_pickles,
)
from .errors import HubError, hub_errors


def pull(
    repo_id: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download a Focus adapter.

    The names and shapes of its tensors are checked against its configuration before the weights are downloaded, and
    the whole adapter afterwards.

    Args:
        repo_id: ``"org/name"``.
        folder: where to put the files; the Hub's cache by default.
        revision: branch, tag or commit.
        token: access token; the one of ``hf auth login`` by default.
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.
        local_files_only: take it from the cache, without asking the Hub.

    Returns:
        The folder that holds the adapter.

    Raises:
        AdapterFileError: what is on the Hub is not a sound Focus adapter.
        HubError: the Hub refused or was not reached.
    """
    api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
    with hub_errors(repo_id, api.endpoint):
        for _ in range(_TRIES):
            commit = None if local_files_only else look_at_remote(api, repo_id, revision).commit
            cached = Path(
                snapshot_download(
                    repo_id,
                    revision=revision,  # by its name, so that the cache knows the name when it is asked offline
                    allow_patterns=list(ADAPTER_FILES),
                    token=token,
                    endpoint=endpoint,
                    local_files_only=local_files_only,
                )
            )
            if commit in (None, cached.name):
                break
        else:
            raise HubError(f"{repo_id} changes all the time: pull a commit of it with revision (--revision).")
        check_adapter(cached)
        return cached if folder is None else _place(cached, Path(folder))


#: How often a pull starts again because the branch moved between the check and the download.
_TRIES = 3


def adapter_folder(adapter: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The checked folder of an adapter that is given by its folder or by its Hub id.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
        HubError: the Hub refused or was not reached.
    """
    name = os.fspath(adapter)
    if names_a_folder(name):
        check_adapter(name)
        return Path(name)
    return pull(name, revision=revision)


@dataclass(frozen=True)
class RemoteAdapter:
    """An adapter on the Hub whose weights have not been downloaded.

    Args:
        info: what the Hub says of it.
        commit: that was looked at.
        config: its configuration.
        size: of the weights in bytes.
    """

    info: ModelInfo
    commit: str
    config: AdapterConfig
    size: int

    def folder(self, api: HfApi) -> Path:
        """The folder in the cache that holds its small files."""
        names = {file.rfilename for file in self.info.siblings or []} & {CONFIG_FILE, RESULTS_FILE}
        paths = [_download(api, self.info.id, name, self.commit) for name in sorted(names)]
        return paths[0].parent


def look_at_remote(api: HfApi, repo_id: str, revision: str | None) -> RemoteAdapter:
    """Check what can be checked without the weights: all later reads should name the commit that comes back.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
    """
    info = api.model_info(repo_id, revision=revision, files_metadata=True)
    sizes, commit = {file.rfilename: file.size for file in info.siblings or []}, str(info.sha)
    source = f"{repo_id} on the Hub"
    if CONFIG_FILE not in sizes:
        raise AdapterFileError(f"{source} has no {CONFIG_FILE}: it is not an adapter.")
    config = read_config(_download(api, repo_id, CONFIG_FILE, commit).parent)
    refuse_pickles(list(sizes), source)
    if WEIGHTS_FILE not in sizes:
        raise AdapterFileError(f"{source} has no {WEIGHTS_FILE}; ask its author to push it again.")
    header = api.parse_safetensors_file_metadata(repo_id, WEIGHTS_FILE, revision=commit)
    weights = f"{WEIGHTS_FILE} of {source}"
    check_tensors({name: tensor.shape for name, tensor in header.tensors.items()}, config, weights)
    size, described = int(sizes[WEIGHTS_FILE] or 0), _described_size(api, repo_id, commit, header)
    if size and size != described:
        raise AdapterFileError(
            f"{weights} has {size:,} bytes, but its header describes {described:,}: it is cut short or holds "
            "something else; ask its author to push it again."
        )
    return RemoteAdapter(info, commit, config, size)


def _described_size(api: HfApi, repo_id: str, commit: str, header: SafetensorsFileMetadata) -> int:
    """Bytes that a safetensors file should have: the length of its header, the header, the numbers."""
    url = hf_hub_url(repo_id, WEIGHTS_FILE, revision=commit, endpoint=api.endpoint)
    headers = {**build_hf_headers(token=api.token), "range": "bytes=0-7"}
    response = get_session().get(url, headers=headers, follow_redirects=True)
    hf_raise_for_status(response)
    (length,) = struct.unpack("<Q", response.content[:8])
    return 8 + int(length) + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)


def _download(api: HfApi, repo_id: str, name: str, commit: str) -> Path:
    return Path(hf_hub_download(repo_id, name, revision=commit, token=api.token, endpoint=api.endpoint))


def _place(cached: Path, folder: Path) -> Path:
    """Copy an adapter out of the cache: complete, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose a new folder, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        shutil.copytree(cached, partial, dirs_exist_ok=True)
        partial.chmod(0o755)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder
