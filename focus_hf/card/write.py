"""Put the card of an adapter into its folder."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import write_atomically
from ..records import load_results, read_config
from .card import FocusModelCard
from .figures import dial_figure
from .metadata import check_hub_id
from .read import CARD, read_card


def write_card(folder: str | os.PathLike[str], *, base_model: str | None = None) -> Path | None:
    """Make the card of an adapter from its records, or refresh it; what a person wrote stays, ours follows it.

    Args:
        folder: of the adapter.
        base_model: Hub id of the base model; the adapter's own by default.

    Returns:
        The card. ``None`` if the base model has no name on the Hub yet: then it is made when the adapter is pushed.

    Raises:
        AdapterFileError: the adapter is damaged.
    """
    folder = Path(folder)
    base = base_model or read_config(folder).base_model_name_or_path or ""
    try:
        check_hub_id(base, "base model")
    except ValueError:
        return None
    if (results := load_results(folder)) is not None:
        dial_figure(results, folder)
    card = FocusModelCard.from_adapter(folder, repo_id=f"your-name/{folder.resolve().name}", base_model=base)
    if (old := read_card(folder)) is not None:
        card = card.refreshing(old)
    write_atomically(folder / CARD, str(card).encode())
    return folder / CARD
