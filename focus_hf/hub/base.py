"""What the Hub says of a base model: its commit, licence and size."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..records.base_model import BaseFacts
from .errors import is_connection

_TIMEOUT = 10.0


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


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit hash, which never moves."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
