"""A page as a static Space: a folder to push as it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import constants
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..escape import escape
from ..files import write_atomically
from .page import Page, write

#: The Hub shows so much of a Space's description.
_DESCRIPTION = 60


def write_space(
    page: Page,
    folder: str | os.PathLike[str],
    models: Sequence[str] = (),
    text: str = "",
    endpoint: str | None = None,
) -> list[Path]:
    """Write ``index.html`` and ``README.md`` with what the Hub wants to know of a static Space.

    Args:
        page: see `focus_hf.explore.render`.
        folder: created if it does not exist.
        models: adapters and base models on the page; those that are Hub ids are linked, and their pages link back.
        text: name of the text.
        endpoint: address of the Hub that links lead to; ``HF_ENDPOINT`` by default.

    Returns:
        The files.

    Raises:
        ValueError: the folder has a ``README.md`` of something else.
    """
    folder = Path(folder)
    readme = folder / "README.md"
    if readme.exists() and "sdk: static" not in readme.read_text(encoding="utf-8"):
        raise ValueError(f"{readme} does not belong to a static Space; choose another folder for --space.")
    linked = list(dict.fromkeys(model for model in models if is_hub_id(model)))
    facts = {
        "title": "Focus explorer",
        "emoji": "🔎",
        "colorFrom": "blue",
        "colorTo": "green",
        "sdk": "static",
        "pinned": False,
        "short_description": "Which distant tokens attend to each other, and why"[:_DESCRIPTION],
        "tags": ["focus", "sparse-attention", "interpretability"],
        **({"models": linked} if linked else {}),
    }
    hub = (endpoint or constants.ENDPOINT).rstrip("/")
    names = " and ".join(f"[{escape(model)}]({hub}/{model})" for model in linked)
    about = [
        "A page made by `focus-hf explore`: the groups of every layer of a",
        "[Focus](https://arxiv.org/abs/2604.03260) adapter, token by token"
        + (f", on {escape(text)}" if text else "")
        + ".",
    ]
    if names:
        about += ["", f"Models: {names}."]
    front = yaml.safe_dump(facts, allow_unicode=True, sort_keys=False)
    body = "\n".join(["# Focus explorer", "", *about])
    write_atomically(readme, f"---\n{front}---\n\n{body}\n".encode())
    write(page, folder / "index.html")
    return [readme, folder / "index.html"]


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the Hub's, and is no folder of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not name.startswith(".") and not os.path.isdir(name)
