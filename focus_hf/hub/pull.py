"""Pull an adapter: only its files, pinned to one commit, checked before and after."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from ..escape import shown
from ..records.adapter_files import (
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
from .errors import hub_errors
from .files import LARGEST, LARGEST_FILE, adapter_files, remote_files
from .remote import HubReader, RemoteModel, note_revision, snapshot


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
            cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        else:
            cached = _fetch(HubReader(api), repo_id, revision)
        check_adapter(cached)
        return cached if folder is None else _place(cached, Path(folder))


def _fetch(reader: HubReader, repo_id: str, revision: str | None) -> Path:
    """Put an adapter's files into the cache, all of one commit."""
    remote = look_at_remote(reader, repo_id, revision)
    model = remote.model
    for name in remote_files(model.files, model.repo_id):
        largest = remote.size if name == WEIGHTS_FILE else LARGEST.get(name, LARGEST_FILE)
        reader.keep(model, name, largest)
    note_revision(model, revision)
    return snapshot(model)


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
        size: of the weights in bytes, as their header describes them.
    """

    model: RemoteModel
    config: AdapterConfig
    size: int


def look_at_remote(reader: HubReader, repo_id: str, revision: str | None) -> RemoteAdapter:
    """Check what can be checked without the weights, and put the configuration into the cache.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
    """
    model = reader.model(repo_id, revision)
    source = f"{repo_id} on the Hub"
    if CONFIG_FILE not in model.files:
        raise AdapterFileError(f"{source} has no {CONFIG_FILE}: it is not an adapter.")
    config = read_config(reader.keep(model, CONFIG_FILE, LARGEST[CONFIG_FILE]).parent)
    refuse_pickles(list(model.files), source)
    if WEIGHTS_FILE not in model.files:
        raise AdapterFileError(f"{source} has no {WEIGHTS_FILE}; {_AGAIN}")
    weights = f"{WEIGHTS_FILE} of {source}"
    shapes, described = _read_header(reader, model, weights)
    check_tensors(shapes, config, weights)
    size = model.files[WEIGHTS_FILE].size
    if size is not None and size != described:
        raise AdapterFileError(
            f"{weights} has {size:,} bytes, but its header describes {described:,}: it is cut short or holds "
            f"something else; {_AGAIN}"
        )
    return RemoteAdapter(model, config, described)


_AGAIN = "ask its author to push it again."

#: Bytes of a safetensors header: the three tensors of a layer take about 400.
_LARGEST_HEADER = 4 * 1024 * 1024

#: Bytes read at first, which hold most headers.
_FIRST_PART = 100_000


def _read_header(reader: HubReader, model: RemoteModel, source: str) -> tuple[dict[str, list[int]], int]:
    """Shapes by name, and how many bytes the whole file should have.

    Raises:
        AdapterFileError: it is not the header of a safetensors file.
    """
    start = reader.part(model, WEIGHTS_FILE, 0, _FIRST_PART)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > _LARGEST_HEADER:
        raise AdapterFileError(f"{source} has no safetensors header of at most {_LARGEST_HEADER:,} bytes; {_AGAIN}")
    if 8 + length > len(start):
        start += reader.part(model, WEIGHTS_FILE, len(start), 8 + length - len(start))
    try:
        said = json.loads(start[8 : 8 + length])
        said.pop("__metadata__", None)
        shapes = {name: [_size(n) for n in tensor["shape"]] for name, tensor in said.items()}
        ends = [_size(tensor["data_offsets"][1]) for tensor in said.values()]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise AdapterFileError(f"{source} has a header that cannot be read ({shown(error)}); {_AGAIN}") from None
    return shapes, 8 + length + max(ends, default=0)


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"a size of {shown(value)}")
    return value


def _place(cached: Path, folder: Path) -> Path:
    """Copy an adapter out of the cache: complete, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose a new folder, or remove it.")
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
    return folder
