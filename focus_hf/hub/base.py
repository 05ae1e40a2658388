"""What the Hub says of a base model: its commit, licence and size."""

from __future__ import annotations

import json

from huggingface_hub import HfApi

from ..records.adapter_files import CONFIG_FILE
from ..records.base_model import BaseFacts
from .errors import HubError, hub_errors
from .files import LARGEST
from .patience import Patience
from .remote import HubReader, strings

#: Seconds to wait for what is good to know and not needed.
_SECONDS = 20.0


def base_facts(name: str, api: HfApi) -> BaseFacts | None:
    """Ask the Hub about a base model; ``None`` if it is not there, not ours to see, or the Hub is not reached."""
    reader = HubReader(api, Patience(_SECONDS))
    try:
        with hub_errors(name, api.endpoint):
            model = reader.model(name)
            config = {}
            if "config.json" in model.files:
                config = json.loads(reader.text(reader.url(model, "config.json"), LARGEST[CONFIG_FILE]))
    except (HubError, ValueError, RecursionError):
        return None
    license = model.card.get("license")
    return BaseFacts(
        name,
        model.commit,
        license if isinstance(license, str) else None,
        strings(model.card.get("language")),
        config if isinstance(config, dict) else {},
    )
