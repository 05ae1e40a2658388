"""What the Hub says of a base model: its commit, licence and size."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from ..commits import is_connection
from ..records.base_model import BaseFacts

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
