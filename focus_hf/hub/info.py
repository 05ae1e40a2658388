"""An adapter in one screen: from its folder, or from the Hub without its weights."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..records.adapter_files import (
    RESULTS_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    check_adapter,
    names_a_folder,
    weights_hash,
)
from ..records.results import Results, load_results
from .errors import hub_errors
from .files import LARGEST
from .pull import look_at_remote
from .remote import Hub, card, files


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
        config = check_adapter(name)
        weights = Path(name) / WEIGHTS_FILE
        return {
            "adapter": name,
            **_facts(config, load_results(name)),
            "bytes": weights.stat().st_size,
            "weights_sha256": weights_hash(name),
        }
    api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
    with hub_errors(name, api.endpoint):
        hub = Hub(api)
        remote = look_at_remote(hub, name, revision)
        model, license = remote.model, card(remote.model).get("license")
        if RESULTS_FILE in files(model):
            hub.fetch(model, RESULTS_FILE, LARGEST[RESULTS_FILE])
        return {
            "adapter": name,
            "commit": model.sha,
            "downloads": model.downloads,
            "likes": model.likes,
            "license": license if isinstance(license, str) else None,
            **_facts(remote.config, load_results(remote.folder)),
            "bytes": files(model)[WEIGHTS_FILE].size,
        }


def _facts(config: AdapterConfig, results: Results | None) -> dict[str, Any]:
    shared = ("routing", "num_groups", "top_k", "local_window", "sink_tokens", "dense_below", "temperature", "gate")
    cells = ("routing", "num_groups", "num_bands", "local_window", "sink_tokens", "dense_below", "pairs")
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
        facts["largest_group"] = results.largest_group
        facts["measured_with"] = results.measured_with
    return facts
