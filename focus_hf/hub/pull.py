"""Pull an adapter: only its files, pinned to one commit, checked before and after."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download

from ..escape import one_line
from ..records.adapter_files import (
    ADAPTER_FILES,
    CONFIG_FILE,
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
from .files import LARGEST, LARGEST_FILE, adapter_files, remote_files
from .remote import AGAIN, Hub, files, is_announced


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
        if local_files_only:
            wanted = list(ADAPTER_FILES)
            cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=wanted))
        else:
            cached = _fetch(Hub(api), repo_id, revision)
        check_adapter(cached)
        return cached if folder is None else _place(cached, Path(folder))


def _fetch(hub: Hub, repo_id: str, revision: str | None) -> Path:
    """Put an adapter's files into the cache, all of one commit."""
    remote = look_at_remote(hub, repo_id, revision)
    announced = files(remote.model)
    names = remote_files(announced, repo_id)
    for name in names:
        largest = remote.largest if name == WEIGHTS_FILE else LARGEST.get(name, LARGEST_FILE)
        hub.fetch(remote.model, name, largest)
    for name in names:  # a server that gives two files one ETag makes the library keep one content for both
        if not is_announced(remote.folder / name, announced[name]):
            raise HubError(f"{hub.api.endpoint} mixes up files of {repo_id}: {name} is not the one that it announced.")
    return remote.folder


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
        model: what the Hub says of it.
        config: its configuration.
        folder: in the cache, with the configuration in it.
        largest: bytes that its weights may have, as their header describes them.
    """

    model: ModelInfo
    config: AdapterConfig
    folder: Path
    largest: int


def look_at_remote(hub: Hub, repo_id: str, revision: str | None) -> RemoteAdapter:
    """Check what can be checked without the weights, and put the configuration into the cache.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
    """
    model = hub.model(repo_id, revision)
    source = f"{repo_id} on the Hub"
    if CONFIG_FILE not in files(model):
        raise AdapterFileError(f"{source} has no {CONFIG_FILE}: it is not an adapter.")
    folder = hub.fetch(model, CONFIG_FILE, LARGEST[CONFIG_FILE], revision or constants.DEFAULT_REVISION).parent
    config = read_config(folder)
    refuse_pickles([one_line(name) for name in files(model)], source)
    if WEIGHTS_FILE not in files(model):
        raise AdapterFileError(f"{source} has no {WEIGHTS_FILE}; {AGAIN}")
    shapes, largest = hub.weights(model, WEIGHTS_FILE)
    check_tensors(shapes, config, f"{WEIGHTS_FILE} of {source}")
    return RemoteAdapter(model, config, folder, largest)


def _place(cached: Path, folder: Path) -> Path:
    """Copy an adapter out of the cache: complete, or not at all."""
    if folder.is_symlink() and not folder.exists():
        raise FileExistsError(f"{folder} is a link to {os.readlink(folder)}, which does not exist: remove the link.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose a new folder, or remove it.")
    asked, folder = folder, folder.resolve()  # a link to an empty folder stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name in adapter_files(cached):
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(cached / name, partial / name)
        partial.chmod(0o755)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return asked
