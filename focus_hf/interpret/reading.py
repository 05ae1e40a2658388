"""What queries read far away: which groups, at which distances, how much attention falls there, which tokens meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, Seen, focus_layers, observe_attention
from ..attention import read_by_any
from ..evaluate.modes import Mode, attending, device_of
from ..evaluate.perplexity import token_losses
from .weights import Stretch, stretches
from .windows import Window

#: Pairs kept of each head.
PAIRS = 5

#: A token that gets this share of the attention of those who have it far away, whoever they are, is where a head
#: rests: like a sink it says nothing about what is looked for.
RESTS = 0.05

#: Added to a head's threshold so that it reads no cell.
NOTHING = 1e4


class DistantPair(NamedTuple):
    """Two tokens far from each other that attend: the weight (mean over query heads), the token ids of their window,
    int64 ``(T,)``, their places in it, the group of the key."""

    weight: float
    ids: np.ndarray
    query: int
    key: int
    group: int


class Reading:
    """What one layer, or one key/value head that routes by itself, reads.

    Args:
        num_groups: ``K``.
        bands: of distance.

    Attributes:
        reads: float64 ``(K, bands)``: queries that read a group at a distance.
        queries: float64 ``(bands,)``: queries that have tokens at that distance.
        attention: float64 ``(K, bands)``: attention that falls there, summed over queries.
        tokens: queries, near ones included.
        far: queries that have distant tokens; silent: those of them that read none.
        pairs: with most attention, at most one for each query.
    """

    def __init__(self, num_groups: int, bands: int) -> None:
        self.reads, self.attention = np.zeros((num_groups, bands)), np.zeros((num_groups, bands))
        self.queries = np.zeros(bands)
        self.tokens = self.far = self.silent = 0
        self.pairs: list[DistantPair] = []
        self._received: list[tuple[Tensor, Tensor]] = []  # by window: distant attention, and who has them far away

    @property
    def looks_far(self) -> float:
        """Share of all attention with which distant tokens are looked for: those on which it does not rest."""
        sought = sum(float(got[got < RESTS * places].sum()) for got, places in self._received)
        return sought / max(self.tokens, 1)

    def add(self, stretch: Stretch, ids: np.ndarray) -> None:
        """Add what it does in a stretch of a window with these token ids, int64 ``(T,)``."""
        members, reads = _members(stretch)
        is_far = stretch.bands.any(dim=0)
        far = stretch.weights(stretch.pairs)[0] * is_far
        for band, here in enumerate(stretch.bands):
            self.attention[:, band] += ((far * here).sum(dim=0) @ members).cpu().numpy()
            has = here.any(dim=-1)
            self.queries[band] += int(has.sum())
            self.reads[:, band] += reads[has, :, band].sum(dim=0).cpu().numpy()
        if stretch.start == 0:
            self._received.append((torch.zeros(len(ids)), torch.zeros(len(ids))))
        for total, of in zip(self._received[-1], (far, is_far), strict=True):
            total[: stretch.stop] += of.sum(dim=0).cpu()
        has = is_far.any(dim=-1)
        self.tokens += len(has)
        self.far += int(has.sum())
        self.silent += int((has & ~(stretch.pairs & is_far).any(dim=-1)).sum())
        best, keys = far.max(dim=-1)
        for row in best.topk(min(PAIRS, len(best))).indices.tolist():
            if best[row] > 0:
                key = int(keys[row])
                pair = DistantPair(float(best[row]), ids, stretch.start + row, key, int(members[key].argmax()))
                self.pairs.append(pair)
        self.pairs = sorted(self.pairs, key=lambda pair: -pair.weight)[:PAIRS]


def _members(stretch: Stretch) -> tuple[Tensor, Tensor]:
    """How much of each key is each group's, float32 ``(S, K)``, and what queries read, bool ``(Q, K, bands)``."""
    who, config = stretch.seen.who, stretch.seen.layer.routing_config
    queries, keys = slice(stretch.start, stretch.stop), slice(0, stretch.stop)
    if who.memberships is None:
        head = stretch.head or 0
        groups = nn.functional.one_hot(who.key_groups[0, head, keys].long(), config.num_groups).float()
        return groups, read_by_any(who.reads, who.key_groups.shape[1])[0, head, queries]
    members = who.memberships[0, keys]
    return members.float() / members.sum(dim=-1, keepdim=True).clamp(min=1), members[queries, :, None]


@torch.no_grad()
def what_is_read(model: nn.Module, windows: Sequence[Window]) -> dict[str, Reading]:
    """Look at the attention of some windows. Distant tokens are those outside the window that are no sink.

    Args:
        model: with an active Focus adapter, as it is set.
        windows: those that are short enough for dense attention tell nothing and are passed over.

    Returns:
        By name of the layer or head, as observers know it; empty if every window is too short.
    """
    found: dict[str, Reading] = {}
    config = focus_layers(model)[0].routing_config

    def look(seen: Seen) -> None:
        for stretch in stretches(seen, seen.who.pattern):
            reading = found.setdefault(stretch.name, Reading(config.num_groups, len(stretch.bands)))
            reading.add(stretch, window.ids.numpy())

    with attending(model, Mode("hard")), observe_attention(model, look):
        for window in windows:
            if len(window.ids) > config.dense_length:
                model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
    return found


@contextmanager
def reading_nothing(layer: FocusLayer, head: int | None) -> Iterator[None]:
    """Within the block one key/value head attends to its window and sinks only; of shared routing the whole layer."""

    if head is None:
        before, layer.mode = layer.mode, "local"
        try:
            yield
        finally:
            layer.mode = before
        return
    offsets = layer.focus_offset[str(layer.routing_adapter)]
    own = offsets.detach().clone()
    of_head = own.unflatten(0, (int(layer.routing_config.key_value_heads or 1), -1)).clone()
    of_head[head] = NOTHING
    with torch.no_grad():  # in place, which whoever has put the router together is told of
        offsets.copy_(of_head.flatten())
    try:
        yield
    finally:
        with torch.no_grad():
            offsets.copy_(own)


def loss_without(
    model: nn.Module,
    names: Sequence[str],
    windows: Sequence[Window],
    tick: Callable[[int], None] = lambda tokens: None,
) -> dict[str, tuple[float, float]]:
    """How much worse the model is, in nats per token, if a head reads nothing far.

    Args:
        model: with an active Focus adapter, as it is set.
        names: of layers or heads, see `what_is_read`.
        windows: short ones tell nothing.
        tick: called with the tokens of each window read.

    Returns:
        For each name the mean, and its standard error over tokens.
    """
    layers = {layer.name: layer for layer in focus_layers(model)}
    result: dict[str, tuple[float, float]] = {}
    with attending(model, Mode("hard")):

        def losses() -> Tensor:
            found = [token_losses(model, window.ids[None])[0] for window in windows]
            tick(sum(len(window.ids) for window in windows))
            return torch.cat(found).double()

        usual = losses()
        for name in names:
            whole, _, head = name.rpartition(".")
            layer, own = (layers[name], None) if name in layers else (layers[whole], int(head))
            with reading_nothing(layer, own):
                more = losses() - usual
            result[name] = more.mean().item(), (more.std() / len(more) ** 0.5).item()
    return result
