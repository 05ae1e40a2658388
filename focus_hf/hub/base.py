"""What the Hub says of a base model: its commit, licence and size."""

from __future__ import annotations

from huggingface_hub import HfApi

from ..records.adapter_files import CONFIG_FILE, read_json
from ..records.base_model import BaseFacts
from .bounds import Bounds
from .errors import HubError, hub_errors
from .files import LARGEST
from .remote import Hub, card, files, strings

#: Seconds to wait for what is good to know and not needed.
_SECONDS = 20.0


def base_facts(name: str, api: HfApi) -> BaseFacts | None:
    """Ask the Hub about a base model; ``None`` if it is not there, not ours to see, or the Hub is not reached."""
    hub = Hub(api, Bounds(api.endpoint, _SECONDS))
    try:
        with hub_errors(name, api.endpoint):
            model = hub.model(name)
            config = {}
            if "config.json" in files(model):
                config = read_json(hub.fetch(model, "config.json", LARGEST[CONFIG_FILE]))
    except (HubError, ValueError):
        return None
    license = card(model).get("license")
    return BaseFacts(
        name,
        str(model.sha),
        license if isinstance(license, str) else None,
        strings(card(model).get("language")),
        config if isinstance(config, dict) else {},
    )
