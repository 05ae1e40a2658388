"""Claims that are checked by looking at the files alone."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..card import FocusModelCard
from ..card.figures import DIAL, dial_points
from ..card.read import is_ours, read_card
from ..card.sections import CardText, Section
from ..records import GroupReport, TokenSample, load_results, read_config
from ..records.adapter_files import WEIGHTS_FILE, weights_hash
from ..records.group_markdown import HEADS, picture, picture_data
from ..records.pictures import digest, digest_in
from .claims import DIFFERS, HOLDS, Claim, same, unchecked


def check_files(folder: Path) -> Iterator[Claim]:
    """Checksums, parameters, and whether text and pictures of the card are what the folder's data says."""
    here, config = weights_hash(folder), read_config(folder)
    results, report = load_results(folder), GroupReport.load(folder)
    recorded = {"quality": results, "group report": report, "sample": TokenSample.load(folder)}
    hashes = {what: found.weights_sha256 for what, found in recorded.items() if found is not None}
    for what, known in hashes.items():
        if not known:
            yield unchecked(f"weights that the {what} belongs to", "", "recorded without a checksum")
        elif known != here:
            yield same(f"weights that the {what} belongs to", known[:16], here[:16], "SHA-256")
    if matching := [what for what, known in hashes.items() if known == here]:
        yield same(f"weights that {', '.join(matching)} belong to", here[:16], here[:16], "SHA-256")
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        names = [name for name in file.keys() if not name.endswith("focus_balance")]  # noqa: SIM118 (not a mapping)
        counted = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    yield same("parameters", f"{config.num_parameters:,}", f"{counted:,}")
    yield from _check_text(folder)
    drawn = report.that_matter(HEADS) if report else []
    made_of: dict[str, Any] = {picture(layer): picture_data(layer) for layer in drawn}
    if results is not None:
        made_of[DIAL] = dial_points(results)
    there = [name for name in made_of if (folder / name).is_file()]
    wrong = [name for name in there if digest_in(folder / name) != digest(made_of[name])]
    yield from (Claim(name, "of its data", "of other data", DIFFERS) for name in wrong)
    if there:
        yield _all_right("pictures", "of their data", len(there), len(wrong))


def _all_right(what: str, claimed: str, count: int, wrong: int) -> Claim:
    return Claim(what, claimed, f"{count - wrong} of {count}", DIFFERS if wrong else HOLDS)


def _check_text(folder: Path) -> Iterator[Claim]:
    """Every section that is made from data, made again from the same data."""
    written = read_card(folder)
    if written is None or not is_ours(written):
        why = "there is no README.md" if written is None else "it was not made by focus-hf"
        yield unchecked("text of the card", "", why)
        return
    card = FocusModelCard(written, ignore_metadata_errors=True)
    text = CardText.parse(card.text)
    ours = "".join(part.body for part in text.parts if part.name)  # above it may stand a person's own title
    title = re.search(r"^# (.+)$", ours, re.MULTILINE)
    repo_id = html.unescape(title.group(1)).strip() if title else ""
    base = str(card.metadata.get("base_model") or "")
    link = re.search(r"\]\((https?://[^\s()]+)/spaces/", ours)  # to the Hub that the card was made for
    link = link or re.search(rf"\]\((https?://[^\s()]+)/{re.escape(base)}\)", ours)
    try:
        made = FocusModelCard.from_adapter(
            folder, repo_id=repo_id, base_model=base, endpoint=link[1] if link else None
        )
    except ValueError as error:  # a title or a base model that cannot be
        yield Claim("text of the card", "as its data says", str(error), DIFFERS)
        return
    fresh = {part.name: part for part in CardText.parse(made.text).parts}
    sections = [part for part in text.parts if part.name]
    wrong = {part.name: found for part in sections if (found := _wrong(part, fresh.get(part.name)))}
    for name, found in wrong.items():
        yield Claim(f"card, section {name}", "as its data says", found, DIFFERS)
    yield _all_right("sections of the card", "as their data says", len(sections), len(wrong))


def _wrong(part: Section, fresh: Section | None) -> str | None:
    """What is wrong with a section of a card, if anything."""
    if part.edited:
        return "changed by hand"
    if fresh is None:
        return "its data is not there"
    return None if part.body.strip() == fresh.body.strip() else "not so"
