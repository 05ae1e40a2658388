"""What queries read far away: which groups, at which distances, how much attention falls there, which tokens meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..adapter import FocusLayer, Seen, focus_layers, observe_attention
from ..attention import attended_pairs
from ..attention.definition import bands_of
from ..evaluate.modes import Mode, attending, device_of
from ..evaluate.perplexity import token_losses
from .collect import Window
from .weights import scores_of, softmax_over

#: Pairs kept of each head.
PAIRS = 5

#: A token that gets this share of the attention of those who have it far away, whoever they are, is where a head
#: rests: like a sink it says nothing about what is looked for.
RESTS = 0.05

#: Added to a head's threshold so that it reads no cell.
NOTHING = 1e4


@dataclass(frozen=True)
class DistantPair:
    """Two tokens far from each other that attend.

    Args:
        weight: attention weight, mean over query heads.
        window: which window.
        query, key: places in it.
        group: of the key.
    """

    weight: float
    window: int
    query: int
    key: int
    group: int


@dataclass
class Reading:
    """What one layer, or one key/value head that routes by itself, reads.

    Args:
        reads: ``(K, bands)``: queries that read a group at a distance.
        queries: ``(bands,)``: queries that have tokens at that distance.
        attention: ``(K, bands)``: attention that falls there, summed over queries.
        sought: attention that goes to distant tokens on which the head does not rest, see `RESTS`.
        tokens: queries, near ones included.
        far: queries that have distant tokens; silent: those of them that read none.
        pairs: with most attention, at most one for each query.
    """

    reads: np.ndarray
    queries: np.ndarray
    attention: np.ndarray
    sought: float = 0.0
    tokens: int = 0
    far: int = 0
    silent: int = 0
    pairs: list[DistantPair] = field(default_factory=list)

    @property
    def looks_far(self) -> float:
        """Share of all attention with which distant tokens are looked for."""
        return self.sought / max(self.tokens, 1)


@torch.no_grad()
def what_is_read(model: nn.Module, windows: Sequence[Window]) -> dict[str, Reading]:
    """Look at the attention of some windows; spells out ``T x T`` weights of one head at a time.

    Distant tokens are those outside the window that are no sink.

    Args:
        model: with an active Focus adapter, as it is set.
        windows: those that are short enough for dense attention tell nothing and are passed over.

    Returns:
        By name of the layer or head, as observers know it; empty if every window is too short.
    """
    found: dict[str, Reading] = {}
    number = 0

    def look(seen: Seen) -> None:
        allowed = attended_pairs(seen.who.sequence(0))[0]
        query_heads, key_heads = seen.query.shape[1], seen.key.shape[1]
        if not seen.layer.routing_config.by_cells:
            _add(found, seen.layer.name, seen, 0, range(query_heads), allowed, number)
            return
        for head in range(key_heads):
            per = query_heads // key_heads
            own = range(head * per, (head + 1) * per)
            _add(found, f"{seen.layer.name}.{head}", seen, head, own, allowed, number)

    with attending(model, Mode("hard")), observe_attention(model, look):
        for number, window in enumerate(windows):  # noqa: B007  (the observer reads it)
            if len(window.ids) > focus_layers(model)[0].routing_config.dense_length:
                model(input_ids=window.ids[None].to(device_of(model)), use_cache=False)
    return found


def _add(
    found: dict[str, Reading], name: str, seen: Seen, head: int, queries: range, allowed: Tensor, number: int
) -> None:
    """Add what one head reads in a window, or all heads of a layer alike.

    Args:
        found: by name.
        name: whose.
        seen: the call.
        head: which key/value head; the first stands for all that route alike.
        queries: the query heads.
        allowed: pairs, bool ``(1 or H_kv or H, T, T)``.
        number: of the window.
    """
    pattern, count = seen.who.pattern, seen.query.shape[2]
    place = torch.arange(count, device=seen.query.device)
    gap = place[:, None] - place[None]
    distant = (gap > pattern.local_window) & (place[None] >= pattern.sink_tokens)
    band = bands_of(gap, pattern)
    weights = _weights(seen, queries, allowed)
    pairs = allowed[_row(queries[0], allowed, seen.query)]
    members, reads = _members(seen, head)
    far = weights * distant
    num_bands = reads.shape[-1]
    reading = found.setdefault(
        name,
        Reading(
            np.zeros((members.shape[1], num_bands)),
            np.zeros(num_bands),
            np.zeros((members.shape[1], num_bands)),
        ),
    )
    for b in range(num_bands):
        here = distant & (band == b)
        reading.attention[:, b] += ((far * here).sum(dim=0) @ members).cpu().numpy()
        has = here.any(dim=-1)
        reading.queries[b] += int(has.sum())
        reading.reads[:, b] += reads[has, :, b].sum(dim=0).cpu().numpy()
    received = far.sum(dim=0)
    reading.sought += float(received[received < RESTS * distant.sum(dim=0)].sum())
    has = distant.any(dim=-1)
    reading.tokens += count
    reading.far += int(has.sum())
    reading.silent += int((has & ~(pairs & distant).any(dim=-1)).sum())
    best, keys = far.max(dim=-1)
    for query in best.topk(min(PAIRS, count)).indices.tolist():
        if best[query] > 0:
            key = int(keys[query])
            reading.pairs.append(DistantPair(float(best[query]), number, query, key, int(members[key].argmax())))
    reading.pairs.sort(key=lambda pair: -pair.weight)
    del reading.pairs[PAIRS:]


def _members(seen: Seen, head: int) -> tuple[Tensor, Tensor]:
    """How much of each key is each group's, float ``(S, K)``, and what queries read, bool ``(Q, K, bands)``."""
    who, config = seen.who, seen.layer.routing_config
    if who.memberships is None:
        groups = torch.nn.functional.one_hot(who.key_groups[0, head].long(), config.num_groups).float()
        return groups, who.reads[0, head]
    members = who.memberships[0]
    return members.float() / members.sum(dim=-1, keepdim=True).clamp(min=1), members[..., None]


def _weights(seen: Seen, queries: range, allowed: Tensor) -> Tensor:
    """Attention weights, mean over these query heads: float32 ``(T, T)``."""
    whole, total = slice(0, seen.query.shape[2]), torch.zeros(allowed.shape[-2:], device=seen.query.device)
    for head in queries:
        scores = scores_of(seen, head, whole, whole)
        total += softmax_over(seen, head, scores, allowed[_row(head, allowed, seen.query)])
    return total / len(queries)


def _row(head: int, allowed: Tensor, query: Tensor) -> int:
    """Where the pairs of a query head are."""
    return head * len(allowed) // query.shape[1]


@contextmanager
def reading_nothing(layer: FocusLayer, head: int | None) -> Iterator[None]:
    """Within the block one key/value head attends to its window and sinks only; of shared routing the whole layer."""
    if head is None:
        before = layer.mode
        layer.mode = "local"
        try:
            yield
        finally:
            layer.mode = before
        return
    offset = layer.focus_offset[str(layer.routing_adapter)]
    kept = offset[head].item()
    with torch.no_grad():
        offset[head] = NOTHING
    try:
        yield
    finally:
        with torch.no_grad():
            offset[head] = kept


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
