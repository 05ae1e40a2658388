"""Claims that are checked by looking at the files alone."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from ..evaluate.sample import TokenSample
from ..hub import AdapterConfig, FocusModelCard, GroupReport, Results
from ..hub.adapter_files import GROUPS_FILE, WEIGHTS_FILE, weights_hash
from ..hub.card import is_ours, read_card
from ..hub.card_sections import CardText
from .claims import Claim, same, unchecked


def check_files(
    folder: Path,
    config: AdapterConfig,
    results: Results | None,
    report: GroupReport | None,
    sample: TokenSample | None,
) -> Iterator[Claim]:
    """Checksums, parameters, and whether the text of the card is what its data says.

    Args:
        folder: of the adapter, all files checked.
        config, results, report, sample: from its files.
    """
    here = weights_hash(folder)
    for what, recorded in (("quality", results), ("group report", report), ("sample", sample)):
        if recorded is None:
            continue
        if recorded.weights_sha256:
            yield same(f"weights that the {what} belongs to", recorded.weights_sha256[:16], here[:16], "SHA-256")
        else:
            yield unchecked(f"weights that the {what} belongs to", "", "recorded without a checksum")
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    counted = sum(_size(shape) for name, shape in shapes.items() if not name.endswith("focus_balance"))
    yield same("parameters", f"{config.num_parameters:,}", f"{counted:,}")
    yield from _check_text(folder)


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _check_text(folder: Path) -> Iterator[Claim]:
    """Every section that is made from data, made again from the same data."""
    written = read_card(folder)
    if written is None or not is_ours(written):
        why = "there is no README.md" if written is None else "it was not made by focus-hf"
        yield unchecked("text of the card", "", why)
        return
    card = FocusModelCard(written, ignore_metadata_errors=True)
    text = CardText.parse(card.text)
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    repo_id = html.unescape(title.group(1)).strip() if title else ""
    made = FocusModelCard.from_adapter(
        folder,
        repo_id=repo_id,
        base_model=str(card.metadata.get("base_model") or ""),
    )
    fresh = {part.name: part for part in CardText.parse(made.text).parts if part.name}
    for part in text.parts:
        if part.name is None:
            continue
        if part.edited:
            yield Claim(f"card, section {part.name}", "as made from the data", "changed by hand", "differs")
        elif part.name in fresh:
            same_text = part.body.strip() == fresh[part.name].body.strip()
            yield same(f"card, section {part.name}", "as its data says", "as its data says" if same_text else "not so")
        else:
            yield Claim(f"card, section {part.name}", "made from data", "its data is not there", "differs")


def load_report(folder: Path) -> GroupReport | None:
    """The adapter's group report, ``None`` if it has none."""
    path = folder / GROUPS_FILE
    return GroupReport.from_json(path) if path.is_file() else None
