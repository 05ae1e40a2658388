"""Adapters from the Hub: looked at without their weights; pulled, only their files, of one commit, checked twice;
loaded."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelInfo, constants, snapshot_download

from ..escape import one_line
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
    weights_hash,
)
from ..records.results import Results, load_results
from .errors import HubError
from .remote import AGAIN, Hub, card, copy_adapter, files, is_announced, remote_files


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
    hub = Hub(endpoint, token)
    with hub.errors(repo_id):
        if local_files_only:
            wanted = list(ADAPTER_FILES)
            cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=wanted))
        else:
            cached = _fetch(hub, repo_id, revision)
        check_adapter(cached)
        return cached if folder is None else _place(cached, Path(folder))


def _fetch(hub: Hub, repo_id: str, revision: str | None) -> Path:
    """Put an adapter's files into the cache, all of one commit."""
    model, folder, largest = _look(hub, repo_id, revision)
    announced = files(model)
    names = remote_files(announced, repo_id)
    for name in names:
        hub.fetch(model, name, largest if name == WEIGHTS_FILE else None)
    for name in names:  # a server that gives two files one ETag makes the library keep one content for both
        if not is_announced(folder / name, announced[name]):
            raise HubError(f"{hub.endpoint} mixes up files of {repo_id}: {name} is not the one that it announced.")
    return folder


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


def load_adapted(
    adapter: str,
    *,
    base: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
) -> Any:
    """Load a base model with a Focus adapter, and its tokenizer.

    Args:
        adapter: folder or Hub id.
        base: folder or Hub id of the base model; the adapter's own by default.
        device: where to.
        device_map: in its place, how accelerate spreads the model: ``"auto"``, ... or a device; see `check_placement`.
        dtype: of the base model's weights, the checkpoint's own by default.
        revision: of the adapter on the Hub.

    Returns:
        The model in eval mode, the tokenizer, the adapter's folder.

    Raises:
        ValueError: the adapter is damaged, its base model is not to be found, or there is no such device or dtype.
        ModuleNotFoundError: ``device_map`` needs accelerate.
        HubError: the Hub refused or was not reached.
    """
    from transformers import AutoTokenizer

    from ..placement import check_placement, load_base

    check_placement(device, device_map, dtype)
    folder = adapter_folder(adapter, revision=revision)
    config = read_config(folder)
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"{adapter} does not name its base model; name it with --model.")
    pinned = config.revision if base is None else None
    tokenizer_pinned = config.tokenizer_revision if base is None else None
    try:
        model = load_base(name, device=device, device_map=device_map, dtype=dtype, revision=pinned)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=tokenizer_pinned or pinned)
    except OSError as error:
        said = str(error).splitlines()[0]
        if pinned is None:
            raise ValueError(f"The base model {name} of {adapter} cannot be loaded: {said}") from None
        raise ValueError(
            f"{adapter} was trained on {name} at commit {pinned[:12]}, which cannot be loaded ({said}). To use "
            f"another version of it, name the model with --model {name}."
        ) from None
    model.load_adapter(str(folder))
    return model.eval(), tokenizer, folder


def adapter_info(
    adapter: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """What an adapter is: settings, size, measured quality, where it comes from.

    Of an adapter on the Hub, the configuration, the results and the header of the weights are read, not the weights.

    Args:
        adapter: folder or Hub id.
        revision: branch, tag or commit on the Hub.
        token: access token; the one of ``hf auth login`` by default.
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.

    Raises:
        AdapterFileError: it is not a sound Focus adapter.
        HubError: the Hub refused or was not reached.
    """
    name = os.fspath(adapter)
    if names_a_folder(name):
        facts = _facts(check_adapter(name), load_results(name))
        size = (Path(name) / WEIGHTS_FILE).stat().st_size
        return {"adapter": name, **facts, "bytes": size, "weights_sha256": weights_hash(name)}
    hub = Hub(endpoint, token)
    with hub.errors(name):
        model, folder, _ = _look(hub, name, revision)
        if RESULTS_FILE in files(model):
            hub.fetch(model, RESULTS_FILE)
        license = card(model).get("license")
        return {
            "adapter": name,
            "commit": model.sha,
            "downloads": model.downloads,
            "likes": model.likes,
            "license": license if isinstance(license, str) else None,
            **_facts(read_config(folder), load_results(folder)),
            "bytes": files(model)[WEIGHTS_FILE].size,
        }


def _facts(config: AdapterConfig, results: Results | None) -> dict[str, Any]:
    common = ("local_window", "sink_tokens", "dense_below")
    shared = ("routing", "num_groups", "top_k", *common, "temperature", "gate")
    cells = ("routing", "num_groups", "num_bands", "each_query_head", *common, "pairs")
    values = asdict(config)
    facts: dict[str, Any] = {
        "base_model": config.base_model_name_or_path,
        "base_revision": config.revision,
        "tokenizer_revision": config.tokenizer_revision,
        **{name: values[name] for name in (cells if config.by_cells else shared)},
        "layers": config.num_layers,
        "parameters": config.num_parameters,
    }
    if results is not None:
        facts["quality"] = [
            {
                "data": evaluation.data,
                "context_length": evaluation.context_length,
                "dense": evaluation.perplexity("dense"),
                "focus": evaluation.perplexity("hard", config.top_k),
            }
            for evaluation in results.evaluations
        ]
        facts |= {"largest_group": results.largest_group, "measured_with": results.measured_with}
    return facts


def _look(hub: Hub, repo_id: str, revision: str | None) -> tuple[ModelInfo, Path, int]:
    """Check what can be checked without the weights.

    Returns:
        What the Hub says; the folder in the cache, with the configuration in it; the bytes that the weights may have.
    """
    model = hub.model(repo_id, revision)
    source = f"{repo_id} on the Hub"
    if CONFIG_FILE not in files(model):
        raise AdapterFileError(f"{source} has no {CONFIG_FILE}: it is not an adapter.")
    folder = hub.fetch(model, CONFIG_FILE, revision=revision or constants.DEFAULT_REVISION).parent
    config = read_config(folder)
    refuse_pickles([one_line(name) for name in files(model)], source)
    if WEIGHTS_FILE not in files(model):
        raise AdapterFileError(f"{source} has no {WEIGHTS_FILE}; {AGAIN}")
    shapes, largest = hub.weights(model, WEIGHTS_FILE)
    check_tensors(shapes, config, f"{WEIGHTS_FILE} of {source}")
    return model, folder, largest


def _place(cached: Path, folder: Path) -> Path:
    """Copy an adapter out of the cache: complete, or not at all."""
    if folder.is_symlink() and not folder.exists():
        raise FileExistsError(f"{folder} is a link to {os.readlink(folder)}, which does not exist: remove the link.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; choose a new folder, or remove it.")
    target = folder.resolve()  # a link to an empty folder stays one
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        whole = Path(scratch) / target.name
        whole.mkdir()
        copy_adapter(cached, whole)
        os.replace(whole, target)
    return folder
