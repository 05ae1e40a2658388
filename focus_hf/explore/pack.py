"""The page's data as JSON: numbers in bytes, deflated layer by layer, so that the browser unpacks only what it shows.

A layer is a row of byte planes of ``T`` bytes each, in this order (``n`` targets):

- ``k`` planes: groups, the most probable one first;
- confidence, linear; near, sink, lost, as square roots (small weights keep their precision);
- ``n`` times low byte of the distance, high byte, weight (square root): far tokens that are attended;
- ``n`` times the same: tokens that the base model attends to and this side does not.

A weight of 0 is no target, whatever its distance.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from .data import TARGETS, ExplorerData, GroupNote, LayerView, Side, perplexity

#: A page stays below this size if it can: fewer targets are kept of each token.
BUDGET = 4_800_000

#: Losses are packed as thousandths of a nat in 16 bits; the largest number stands for "not predicted".
LOSS_UNIT = 1000
NOT_PREDICTED = 65_535


def pack(data: ExplorerData, budget: int = BUDGET) -> tuple[str, int]:
    """The page's data as JSON that can stand in a ``<script>`` element.

    Args:
        data: what is on the page.
        budget: characters that it should not exceed.

    Returns:
        The JSON, and how many targets of each token are in it: as many as fit.
    """
    for targets in range(TARGETS, -1, -1):
        text = _json(data, targets)
        if len(text) <= budget:
            break
    return text, targets


def _json(data: ExplorerData, targets: int) -> str:
    values = {
        "text": data.text,
        "tokens": data.tokens,
        "starts": data.starts,
        "leftOut": data.left_out,
        "layers": data.layers,
        "targets": targets,
        "dense": {"losses": pack_losses(data.dense_losses), "perplexity": _number(perplexity(data.dense_losses))},
        "sides": [_side(side, targets) for side in data.sides],
    }
    return in_script(json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def _side(side: Side, targets: int) -> dict[str, Any]:
    return {
        "name": side.name,
        "topK": side.top_k,
        "groups": side.num_groups,
        "window": side.pattern.local_window,
        "sinks": side.pattern.sink_tokens,
        "denseBelow": side.pattern.dense_below,
        "perplexity": _number(perplexity(side.losses)),
        "losses": pack_losses(side.losses),
        "notes": [[_note(note) for note in layer] or None for layer in side.notes],
        "colours": side.colours,
        "overlaps": [[round(overlap, 3) for overlap in layer] for layer in side.overlaps],
        "patterns": [_pattern(layer) for layer in side.layers],
        "pairs": [round(layer.pairs, 4) for layer in side.layers],
        "layers": [pack_layer(layer, targets) for layer in side.layers],
    }


def _pattern(layer: LayerView) -> dict[str, Any]:
    """How a layer, or a head, attends, and how many planes say what groups a token is in and reads."""
    return {
        "window": layer.pattern.local_window,
        "denseBelow": layer.pattern.dense_below,
        "groups": layer.groups.shape[1],
        "reads": None if layer.reads is None else layer.reads.shape[1],
    }


def _note(note: GroupNote) -> dict[str, Any]:
    return {"label": note.label, "share": round(note.share, 4), "tokens": note.tokens}


def _number(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None


def in_script(text: str) -> str:
    """JSON that cannot end the ``<script>`` element around it, nor begin a comment or another element in it."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def pack_layer(layer: LayerView, targets: int) -> str:
    """A layer's planes, deflated, in base64."""
    masses = (_root(mass) for mass in (layer.near, layer.sink, layer.lost))
    reads: list[np.ndarray] = [] if layer.reads is None else list(layer.reads.T)
    planes = [*layer.groups.T, *reads, _byte(layer.confidence), *masses]
    for distance, weight in (
        (layer.far_distance, layer.far_weight),
        (layer.lost_distance, layer.lost_weight),
    ):
        for number in range(targets):
            weights = _root(weight[:, number])
            back = np.where(weights > 0, distance[:, number], 0).astype(np.uint16)
            planes += [(back & 255).astype(np.uint8), (back >> 8).astype(np.uint8), weights]
    return _deflated(np.stack(planes).astype(np.uint8).tobytes())


def pack_losses(losses: np.ndarray) -> str:
    """Little-endian 16 bits for each token, see `LOSS_UNIT`, deflated, in base64."""
    scaled = np.clip(np.round(np.nan_to_num(losses, nan=0.0) * LOSS_UNIT), 0, NOT_PREDICTED - 1)
    return _deflated(np.where(np.isnan(losses), NOT_PREDICTED, scaled).astype("<u2").tobytes())


def _byte(values: np.ndarray) -> np.ndarray:
    return np.round(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _root(values: np.ndarray) -> np.ndarray:
    return _byte(np.sqrt(np.clip(values, 0, 1)))


def _deflated(content: bytes) -> str:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)  # raw deflate, as DecompressionStream("deflate-raw") reads it
    return base64.b64encode(packer.compress(content) + packer.flush()).decode()
