"""A recorded sample of tokens with their groups: by it, others see that an adapter routes for them as it did here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, focus_layers, observe_routing, routing_mode
from ..files import write_atomically
from ..records.adapter_files import SAMPLE_FILE, AdapterFileError, read_json
from .modes import device_of, in_evaluation

SCHEMA = 1

#: Tokens of a sample, unless the window is shorter.
LENGTH = 256


@dataclass(frozen=True)
class TokenSample:
    """Tokens, and the first group of each in every layer.

    Args:
        ids: token ids.
        groups: for each attention module its tokens' groups.
        top_k: of the adapter when it was recorded.
        weights_sha256: of the adapter.
        schema: version of the file's format.
    """

    ids: list[int]
    groups: dict[str, list[int]]
    top_k: int
    weights_sha256: str = ""
    schema: int = SCHEMA

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``focus_sample.json`` into an adapter's folder."""
        text = json.dumps(asdict(self), separators=(",", ":")) + "\n"
        write_atomically(Path(folder) / SAMPLE_FILE, text.encode())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TokenSample | None:
        """Read it from an adapter's folder; ``None`` if there is none.

        Raises:
            AdapterFileError: it cannot be read.
        """
        path = Path(folder) / SAMPLE_FILE
        if not path.is_file():
            return None
        try:
            sample = cls(**read_json(path))
            lengths = {len(sample.ids), *map(len, sample.groups.values())}
            if sample.schema > SCHEMA or len(lengths) != 1 or not all(isinstance(i, int) for i in sample.ids):
                raise ValueError("its lists do not fit together, or it was written by a newer focus_hf")
        except (TypeError, ValueError, AttributeError) as error:
            raise AdapterFileError(f"{path} cannot be read ({error}); record it again.") from None
        return sample


@torch.no_grad()
def take_sample(model: nn.Module, ids: Tensor, weights_sha256: str = "") -> TokenSample:
    """Record the groups of the first tokens of a text, as the adapter routes them when it runs.

    Args:
        model: with an active Focus adapter.
        ids: token ids ``(n,)``; at most `LENGTH` of them are taken.
        weights_sha256: of the adapter, see `focus_hf.records.adapter_files.weights_hash`.
    """
    ids = ids[:LENGTH]
    groups: dict[str, list[int]] = {}

    def keep(layer: FocusLayer, scores: Tensor, memberships: Tensor) -> None:
        balance = layer.focus_balance[str(layer.routing_adapter)].detach().float()
        groups[layer.name] = (scores[0] + balance.to(scores.device)).argmax(dim=-1).tolist()

    with in_evaluation(model), routing_mode(model, "hard"), observe_routing(model, keep):
        model(input_ids=ids[None].to(device_of(model)), use_cache=False)
    top_k = focus_layers(model)[0].routing_config.top_k
    # Names as in the base model, whether or not PEFT has wrapped it.
    plain = {name.removeprefix("base_model.model."): found for name, found in groups.items()}
    return TokenSample(ids.tolist(), plain, top_k, weights_sha256)


def same_groups(one: TokenSample, other: TokenSample) -> float:
    """Share of tokens and layers that are in the same group; 0 where the layers differ."""
    if one.groups.keys() != other.groups.keys():
        return 0.0
    pairs = [pair for name, groups in one.groups.items() for pair in zip(groups, other.groups[name], strict=True)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
