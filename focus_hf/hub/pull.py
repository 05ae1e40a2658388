"""Pull an adapter: only its files, pinned to one commit, checked before and after."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from .adapter_files import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFileError,
    check_adapter,
    check_tensors,
    read_config,
    refuse_pickles,
)
from .errors import hub_errors


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
        if not local_files_only:
            revision = _check_remote(api, repo_id, revision)
        cached = Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(ADAPTER_FILES),
                token=token,
                endpoint=endpoint,
                local_files_only=local_files_only,
            )
        )
    check_adapter(cached)
    return cached if folder is None else _place(cached, Path(folder))


def adapter_folder(adapter: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The checked folder of an adapter that is given by its folder or by its Hub id.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
        HubError: the Hub refused or was not reached.
    """
    name = os.fspath(adapter)
    if os.path.isdir(name) or os.path.isabs(name) or name.startswith((".", "~")):
        check_adapter(name)
        return Path(name)
    return pull(name, revision=revision)


def check_writable(adapter: str) -> None:
    """Make sure that an adapter is a folder of the user's, into which files may be put.

    Raises:
        ValueError: it is on the Hub, and what lies on this machine is a cache.
    """
    if not os.path.isdir(adapter):
        raise ValueError(f"--write puts files into the adapter's folder: pull {adapter} into one first.")


def _check_remote(api: HfApi, repo_id: str, revision: str | None) -> str:
    """Check what can be checked without the weights; returns the commit, so that all files come from the same one."""
    info = api.model_info(repo_id, revision=revision)
    names, commit = [file.rfilename for file in info.siblings or []], str(info.sha)
    source = f"{repo_id} on the Hub"
    if CONFIG_FILE not in names:
        raise AdapterFileError(f"{source} has no {CONFIG_FILE}: it is not an adapter.")
    path = hf_hub_download(repo_id, CONFIG_FILE, revision=commit, token=api.token, endpoint=api.endpoint)
    config = read_config(Path(path).parent)
    refuse_pickles(names, source)
    if WEIGHTS_FILE not in names:
        raise AdapterFileError(f"{source} has no {WEIGHTS_FILE}; ask its author to push it again.")
    header = api.parse_safetensors_file_metadata(repo_id, WEIGHTS_FILE, revision=commit)
    check_tensors(
        {name: tensor.shape for name, tensor in header.tensors.items()}, config, f"{WEIGHTS_FILE} of {source}"
    )
    return commit


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
