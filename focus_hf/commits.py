"""Which commit a name on the Hub stands for: what loads by name is pinned by it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

_TIMEOUT = 10.0


def commit_of(name: str, revision: str | None = None) -> str | None:
    """The commit that a name and revision stand for now: the Hub's answer, or what the cache holds.

    ``None`` for a folder, and where neither knows.
    """
    if os.path.isdir(name) or is_commit(revision):
        return None if os.path.isdir(name) else revision
    with suppress(Exception):  # of refusals, of trouble with the network, of the library's reader of strangers' cards
        found = HfApi(library_name="focus_hf").model_info(name, revision=revision, timeout=_TIMEOUT).sha
        return found if is_commit(found) else None
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit hash, which never moves."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def is_connection(error: Exception) -> bool:
    """HTTP libraries have their own exception families; their transport errors are known by name."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"RequestError", "InvalidURL", "ConnectionError"})
