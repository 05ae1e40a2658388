"""The page's data as JSON: numbers in bytes, deflated head by head, so that the browser unpacks only what it shows.

A head is a row of byte planes of ``T`` bytes each, in this order (``n`` targets):

- the tokens' groups;
- far and lost, as square roots (small weights keep their precision);
- ``n`` times low byte of the distance, high byte, weight, weight under dense attention (square roots): far tokens.

Both weights 0 is no target, whatever its distance. A page has room for so much: then fewer targets are kept of each
token, and of the heads those with most to show; of the others it has words and numbers.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from .data import TARGETS, ExplorerData, Head
from .words import HeadWords, PageWords, told_bands

#: A page's data stays below this many characters.
BUDGET = 1_350_000

#: Far tokens kept of each token where not all heads would fit otherwise.
FEWER_TARGETS = 4

#: Weights below it are left out.
LEAST = 0.005


@dataclass(frozen=True)
class Packed:
    """The data of a page.

    Args:
        text: JSON that can stand in a ``<script>`` element.
        targets: far tokens kept of each token.
        heads: of how many heads it shows the tokens.
        words: of all heads.
    """

    text: str
    targets: int
    heads: int
    words: list[HeadWords]


def pack(data: ExplorerData, budget: int = BUDGET) -> Packed:
    """The page's data as JSON, with as much in it as fits into ``budget`` characters; tokens and words always are."""
    words = list(map(PageWords(data).of, data.heads))
    order = sorted(range(len(words)), key=lambda number: (-words[number].interest, number))
    room = budget - len(_json(data, words, order, {}, 0))
    for targets in (TARGETS, FEWER_TARGETS):
        packed = {number: pack_head(data.heads[number], targets) for number in order}
        if sum(map(len, packed.values())) <= room:
            break
    total = list(accumulate(len(packed[number]) for number in order))
    kept = {number: packed[number] for number, length in zip(order, total, strict=True) if length <= room}
    return Packed(_json(data, words, order, kept, targets), targets, len(kept), words)


def _json(data: ExplorerData, words: list[HeadWords], order: list[int], packed: dict[int, str], targets: int) -> str:
    dense, focus = data.perplexities
    values = {
        "adapter": data.adapter,
        "text": data.text,
        "setting": data.setting,
        "tokens": data.tokens,
        "starts": data.starts,
        "leftOut": data.left_out,
        "window": data.pattern.local_window,
        "bandStarts": data.pattern.band_starts(),
        "bands": [told_bands(band, band, data.pattern) for band in range(data.pattern.num_bands)],
        "perplexity": {"dense": dense, "focus": focus},
        "pairs": round(data.pairs, 4),
        "targets": targets,
        "order": order,
        "heads": [
            {
                "name": head.name,
                "layer": head.layer,
                "head": head.head,
                "words": said.sentence,
                "far": round(said.far, 4),
                "rests": said.rests,
                "reach": round(head.reach, 1),
                "pairs": round(head.pairs, 4),
                "groups": [asdict(group) for group in said.groups],
                "data": packed.get(number),
            }
            for number, (head, said) in enumerate(zip(data.heads, words, strict=True))
        ],
    }
    return in_script(json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def in_script(text: str) -> str:
    """JSON that cannot end the ``<script>`` element around it, nor begin a comment or another element in it."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def pack_head(head: Head, targets: int) -> str:
    """A head's planes, deflated, in base64."""
    planes: list[Any] = [head.groups, _root(head.far), _root(head.lost)]
    for number in range(targets):
        weights = [np.where(of >= LEAST, _root(of), 0) for of in (head.weight[:, number], head.dense[:, number])]
        back = np.where(np.maximum(*weights) > 0, head.distance[:, number], 0).astype(np.uint16)
        planes += [back & 255, back >> 8, *weights]
    # Raw deflate, as DecompressionStream("deflate-raw") reads it.
    return base64.b64encode(zlib.compress(np.stack(planes).astype(np.uint8).tobytes(), 9, wbits=-15)).decode()


def _root(values: np.ndarray) -> np.ndarray:
    return np.round(np.sqrt(np.clip(values, 0, 1)) * 255).astype(np.uint8)
