"""What the Hub says of a base model: its commit, licence and size."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from .adapter_files import AdapterConfig
from .errors import is_connection

_TIMEOUT = 10.0


@dataclass(frozen=True)
class BaseFacts:
    """A base model on the Hub.

    Args:
        name: Hub id.
        commit: of its main branch, 40 hexadecimal digits.
        license, language: as its card says.
        config: its ``config.json``; empty if it cannot be read.
    """

    name: str
    commit: str
    license: str | None = None
    language: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


def base_facts(name: str, api: HfApi) -> BaseFacts | None:
    """Ask the Hub about a base model; ``None`` if it is not there, not ours to see, or the Hub is not reached."""
    try:
        info = api.model_info(name, timeout=_TIMEOUT)
        card = info.card_data.to_dict() if info.card_data else {}
        config = {}
        if any(file.rfilename == "config.json" for file in info.siblings or []):
            config = json.loads(Path(api.hf_hub_download(name, "config.json", revision=info.sha)).read_text("utf-8"))
    except (HfHubHTTPError, OSError, ValueError):
        return None
    except Exception as error:  # HTTP libraries have their own families of exceptions
        if not is_connection(error):
            raise
        return None
    language = card.get("language") or []
    return BaseFacts(
        name,
        str(info.sha),
        card.get("license") if isinstance(card.get("license"), str) else None,
        [language] if isinstance(language, str) else [str(item) for item in language],
        config if isinstance(config, dict) else {},
    )


def commit_of(name: str, revision: str | None = None) -> str | None:
    """The commit that a name and revision stand for now: the Hub's answer, or what the cache holds.

    ``None`` for a folder, and where neither knows.
    """
    if os.path.isdir(name) or is_commit(revision):
        return None if os.path.isdir(name) else revision
    try:
        return str(HfApi(library_name="focus_hf").model_info(name, revision=revision, timeout=_TIMEOUT).sha)
    except Exception as error:
        if not isinstance(error, HfHubHTTPError | OSError | ValueError) and not is_connection(error):
            raise
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def check_fits(config: AdapterConfig, base: BaseFacts) -> None:
    """Make sure that an adapter's shapes are those of its base model.

    Raises:
        ValueError: they are not; says which value differs.
    """
    text = base.config.get("text_config") or base.config
    width = next((text[name] for name in ("hidden_size", "n_embd", "d_model") if name in text), None)
    if width is not None and width != config.hidden_size:
        raise ValueError(
            f"The adapter was made for a model of hidden_size {config.hidden_size}, but {base.name} has {width}: "
            "name the base model it was trained on."
        )
    layers = next((text[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in text), None)
    if layers is not None and config.layers and max(config.layers) >= layers:
        raise ValueError(
            f"The adapter routes layer {max(config.layers)}, but {base.name} has {layers} layers: "
            "name the base model it was trained on."
        )


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit hash, which never moves."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
