"""The page: one HTML file that needs nothing else, and runs no script but its own; and a Space that shows it."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import constants
from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..escape import escape
from ..files import template_folder, write_atomically
from .data import ExplorerData
from .pack import BUDGET, Packed, pack

#: In the order in which they stand in the page.
_SCRIPTS = ("explore-data.js", "explore-map.js", "explore-text.js", "explore-panel.js", "explore.js")


@dataclass(frozen=True)
class Page:
    """A page as HTML, and what is in it."""

    html: str
    packed: Packed


def render(data: ExplorerData, budget: int = BUDGET) -> Page:
    """The page as one HTML document.

    Text from outside is in it only as JSON, which the page's script puts into the document as text. A content security
    policy allows that one script by its hash and forbids everything else: other scripts, requests, forms. As much of
    the data is in it as fits into ``budget`` characters, see `pack`.
    """
    folder = template_folder()
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    style = (folder / "explore.css").read_text(encoding="utf-8")
    packed = pack(data, budget)
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    html = environment.get_template("explore.html.jinja").render(
        title=data.adapter,
        window=f"{data.pattern.local_window:,}",
        sinks=f" and to the first {data.pattern.sink_tokens} of the text" if data.pattern.sink_tokens else "",
        cells=data.by_cells,
        policy=(
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
            "form-action 'none'"
        ),
        # Our own files and JSON that cannot end its element: nothing here may be escaped once more.
        script=Markup(script),
        style=Markup(style),
        data=Markup(packed.text),
    )
    return Page(html, packed)


def write(page: Page, path: str | os.PathLike[str]) -> int:
    """Write a page; returns its size in bytes."""
    # A lone surrogate in a name has no place in UTF-8; tokens hold none, see `focus_hf.explore.text.visible`.
    content = page.html.encode("utf-8", errors="replace")
    write_atomically(Path(path), content)
    return len(content)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def write_space(page: Page, folder: str | os.PathLike[str], models: Sequence[str] = (), text: str = "") -> list[Path]:
    """A page as a static Space, a folder to push as it is: ``index.html`` and the ``README.md`` that the Hub wants.

    Args:
        page: see `render`.
        folder: created if it does not exist.
        models: adapters and base models on the page; those that are Hub ids are linked, and their pages link back.
        text: name of the text.

    Returns:
        The files.

    Raises:
        ValueError: the folder has a ``README.md`` of something else.
    """
    index, readme = Path(folder) / "index.html", Path(folder) / "README.md"
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
        "short_description": "Which distant tokens attend to each other, and why",  # the Hub shows 60 characters
        "tags": ["focus", "sparse-attention", "interpretability"],
        **({"models": linked} if linked else {}),
    }
    front = yaml.safe_dump(facts, allow_unicode=True, sort_keys=False)
    body = (
        "# Focus explorer\n\nA page made by `focus-hf explore`: the groups of every layer of a\n"
        f"[Focus](https://arxiv.org/abs/2604.03260) adapter, token by token{f', on {escape(text)}' if text else ''}.\n"
    )
    if linked:
        hub = constants.ENDPOINT.rstrip("/")
        body += f"\nModels: {' and '.join(f'[{escape(model)}]({hub}/{model})' for model in linked)}.\n"
    write_atomically(readme, f"---\n{front}---\n\n{body}".encode())
    write(page, index)
    return [readme, index]


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the Hub's, and is no folder of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not name.startswith(".") and not os.path.isdir(name)
