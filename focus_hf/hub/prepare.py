"""What a push sends: an adapter's files in a folder of their own, checked, with the base model's name on the Hub."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..card.metadata import check_hub_id
from ..files import write_atomically
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, AdapterConfig, check_adapter, read_json
from ..records.group_report import GroupReport
from ..records.results import Results, save_results
from .errors import HubError
from .remote import Hub, card, copy_adapter, files

#: Seconds to wait for what is good to know of a base model and not needed.
_SECONDS = 20.0


def gather(model_or_folder: Any, target: Path, adapter_name: str | None, results: Results | None) -> None:
    """Put the files of an adapter, checked, into a folder from which they are pushed."""
    if isinstance(model_or_folder, str | os.PathLike):
        check_adapter(model_or_folder)
        copy_adapter(Path(model_or_folder), target)
    else:
        from ..adapter.save import save_adapter

        save_adapter(model_or_folder, target, adapter_name)
    if results is not None:
        save_results(results, target)


def name_base(folder: Path, base_model: str | None, endpoint: str | None, token: str | None) -> ModelCardData | None:
    """Write the base model's Hub id where its name stands: a path on this machine must not leave it.

    Returns:
        The metadata of the base model's card, see `base_card`.

    Raises:
        ValueError: the base model has no such id, or other shapes than the adapter.
    """
    config = check_adapter(folder)
    name = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
    base, its_config = base_card(name, endpoint, token)
    check_fits(config, name, its_config)
    values = read_json(folder / CONFIG_FILE)
    if values["base_model_name_or_path"] != name:
        values["base_model_name_or_path"] = name
        write_atomically(folder / CONFIG_FILE, json.dumps(values, indent=2, sort_keys=True).encode())
    if (folder / GROUPS_FILE).is_file():
        report = GroupReport.from_json(folder / GROUPS_FILE)
        if report.base_model != name:
            replace(report, base_model=name).to_json(folder / GROUPS_FILE)
    return base


def base_card(
    name: str, endpoint: str | None = None, token: str | None = None
) -> tuple[ModelCardData | None, dict[str, Any]]:
    """The metadata of a base model's card and its ``config.json``, as far as it is on the Hub, which is reached, and
    ours to see."""
    hub = Hub(endpoint, token, _SECONDS)
    try:
        with hub.errors(name):
            model = hub.model(name)
            config = read_json(hub.fetch(model, "config.json")) if "config.json" in files(model) else {}
    except (HubError, ValueError):
        return None, {}
    return card(model), config if isinstance(config, dict) else {}


def check_fits(config: AdapterConfig, name: str, base: dict[str, Any]) -> None:
    """Make sure that an adapter's shapes are those of its base model, as far as its ``config.json`` says them.

    Raises:
        ValueError: they are not; says which value differs.
    """
    text = base["text_config"] if isinstance(base.get("text_config"), dict) else base

    def stated(*names: str) -> int | None:
        return next((text[name] for name in names if isinstance(text.get(name), int)), None)

    width = stated("attention_hidden_size", "hidden_size", "n_embd", "d_model")  # the first is Zamba's: two in one
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"The adapter was made for a model of hidden_size {config.hidden_size}, but {name} has {width}: name the "
            "base model it was trained on."
        )
    layers = stated("num_hidden_layers", "n_layer", "num_layers")
    if layers is not None and config.layers and max(config.layers) >= layers:
        raise ValueError(
            f"The adapter routes layer {max(config.layers)}, but {name} has {layers} layers: name the base model it "
            "was trained on."
        )
