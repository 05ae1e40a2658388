"""Read a text with one or two adapters and keep what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapter import FocusConfig, FocusLayer, Router, final_scores, focus_layers, groups_read, observe_routing
from ..attention import WhoAttends, attended_pairs
from ..evaluate.modes import Mode, attending, device_of
from ..interpret import GroupReport
from .data import LONGEST_WINDOW, TARGETS, ExplorerData, Side
from .notes import group_notes, match_sides
from .observe import AttentionCall, attention_calls, mean_weights, strongest
from .rows import row_names, rows_of
from .text import Passage, passages

#: Groups are packed as bytes.
MOST_GROUPS = 255


@dataclass(frozen=True)
class Subject:
    """What one side of the page looks at.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        name: for people.
        top_k: groups per token; the adapter's own by default.
        report: the adapter's own group report, for the legend.
    """

    model: nn.Module
    name: str
    top_k: int | None = None
    report: GroupReport | None = None


def explore(
    subjects: Sequence[Subject],
    tokenizer: Any,
    texts: str | Sequence[str],
    *,
    name: str = "",
    max_tokens: int = 5000,
    window: int | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> ExplorerData:
    """Look at what adapters do with a text, token by token.

    The text is read in windows of as many tokens as the model has positions; attention does not cross them.

    Args:
        subjects: one, or two to compare: two adapters of one base model, or one model at two ``top_k``.
        tokenizer: of the base model.
        texts: one or several.
        name: of the text.
        max_tokens: tokens shown.
        window: tokens read at a time; as many as the model has positions by default, and at most.
        tick: called with the number of tokens of every pass over a window, see `passes`.

    Raises:
        ValueError: no text, more than two sides, sides that route different layers, a ``top_k`` out of range.
    """
    _check(subjects)
    texts = [texts] if isinstance(texts, str) else texts
    length = window_length(subjects[0].model, max_tokens if window is None else window)
    windows, left_out = passages(tokenizer, texts, max_tokens, length)
    tokens = sum(len(one.ids) for one in windows)
    names = row_names(subjects[0].model)
    readings = [_Reading(subject, tokens) for subject in subjects]
    by_model: dict[int, list[_Reading]] = {}  # the base model is read once for both sides of one model
    for reading in readings:
        by_model.setdefault(id(reading.model), []).append(reading)
    dense_losses = np.full(tokens, np.nan, dtype=np.float32)
    starts, start = [], 0
    for passage in windows:
        place = slice(start, start + len(passage.ids))
        for reading in readings:
            reading.read(passage, place)
            tick(len(passage.ids))
        for of_model in by_model.values():
            losses = _read_dense(of_model, passage, place)
            if of_model[0] is readings[0]:  # both models have the same base
                dense_losses[place] = losses
            tick(len(passage.ids))
        starts.append(start)
        start = place.stop
    sides = [reading.side(subject, names) for reading, subject in zip(readings, subjects, strict=True)]
    match_sides(sides, same_groups=len(by_model) == 1)
    pieces = [piece for passage in windows for piece in passage.pieces]
    return ExplorerData(name, pieces, starts, names, sides, dense_losses, left_out)


def passes(subjects: Sequence[Subject]) -> int:
    """How often `explore` reads each token."""
    return len(subjects) + len({id(subject.model) for subject in subjects})


def window_length(model: Any, wanted: int) -> int:
    """Tokens read at a time: what is wanted, if the model has the positions.

    Raises:
        ValueError: it is not positive.
    """
    if wanted < 1:
        raise ValueError(f"There must be at least one token, got {wanted}.")
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(wanted, LONGEST_WINDOW if positions is None else positions, LONGEST_WINDOW)


def _check(subjects: Sequence[Subject]) -> None:
    if not 1 <= len(subjects) <= 2:
        raise ValueError(f"The page has room for one or two sides, got {len(subjects)}.")
    layers = [row_names(subject.model) for subject in subjects]
    if not layers[0]:
        raise ValueError("No head of this adapter attends by groups, so there is nothing to show.")
    if layers[0] != layers[-1]:
        raise ValueError(
            f"The adapters route different layers or heads ({len(layers[0])} and {len(layers[-1])}), so they cannot "
            "stand side by side. Make a page of each."
        )
    for subject in subjects:
        groups = _config(subject.model).num_groups
        if groups > MOST_GROUPS:
            raise ValueError(f"The page shows up to {MOST_GROUPS} groups; {subject.name} has {groups}.")
        if subject.top_k is not None and not 1 <= subject.top_k <= groups:
            raise ValueError(f"top_k must be from 1 to num_groups ({groups}), got {subject.top_k}.")


def _config(model: nn.Module) -> FocusConfig:
    return focus_layers(model)[0].routing_config


class _Reading:
    """One side while windows are read, one after the other."""

    def __init__(self, subject: Subject, tokens: int) -> None:
        config = _config(subject.model)
        self.model = subject.model
        self.top_k = config.top_k if subject.top_k is None else subject.top_k
        self.pattern = config.pattern
        self.rows = {layer: rows_of(layer) for layer in focus_layers(self.model)}
        with attending(self.model, Mode("hard", self.top_k)):
            self.views = {
                row.name: row.empty_view(config, tokens, self.top_k) for rows in self.rows.values() for row in rows
            }
        self.counts = {name: [0, 0] for name in self.views}
        self.who: dict[str, WhoAttends] = {}  # of the window that is being read
        self.losses = np.full(tokens, np.nan, dtype=np.float32)

    def read(self, passage: Passage, place: slice) -> None:
        """Read a window in hard mode."""

        def note(router: Router, scores: Tensor, memberships: Tensor) -> None:
            view, reads = self.views[router.name], groups_read(router, memberships)
            scores = final_scores(router, scores[0])
            groups = view.groups.shape[1]
            order = scores.masked_fill(~memberships[0], float("-inf")).topk(groups, dim=-1).indices
            view.groups[place] = order.cpu().numpy()
            view.confidence[place] = scores.softmax(dim=-1).gather(-1, order[:, :1])[:, 0].cpu().numpy()
            if view.reads is not None:
                view.reads[place] = reads[0].int().topk(view.reads.shape[1], dim=-1).indices.cpu().numpy()
            length = memberships.shape[1]
            positions = torch.arange(length, device=memberships.device)[None]
            self.who[router.name] = WhoAttends(view.pattern, positions, memberships, reads=reads)
            self.counts[router.name][0] += _count(self.attended(router.name), length)
            self.counts[router.name][1] += length * (length + 1) // 2

        def look(layer: FocusLayer, whole: AttentionCall) -> None:
            for row in self.rows[layer]:
                view, pattern = self.views[row.name], self.views[row.name].pattern
                for start, stop, distance, weights in mean_weights(row.part(whole), self.attended(row.name)):
                    rows = slice(place.start + start, place.start + stop)
                    beyond = distance > pattern.local_window
                    keys = torch.arange(stop, device=weights.device)
                    view.near[rows] = _sum(weights * ~beyond)
                    view.sink[rows] = _sum(weights * (beyond & (keys < pattern.sink_tokens)))
                    back, weight = strongest(weights * beyond, distance, TARGETS)
                    view.far_distance[rows], view.far_weight[rows] = back.cpu().numpy(), weight.cpu().numpy()

        with attending(self.model, Mode("hard", self.top_k)), observe_routing(self.model, note):
            self.losses[place] = _forward(self.model, passage, look)

    def attended(self, name: str) -> Callable[[int, int], Tensor]:
        """By the definition: which of the first ``stop`` tokens the tokens from ``start`` on attend to."""
        who = self.who[name]

        def pairs(start: int, stop: int) -> Tensor:
            return attended_pairs(who, slice(start, stop), slice(stop))[0, 0]

        return pairs

    def side(self, subject: Subject, names: Sequence[str]) -> Side:
        for name, view in self.views.items():
            attended, possible = self.counts[name]
            view.pairs = attended / max(possible, 1)
        groups = _config(self.model).num_groups
        notes = [] if subject.report is None else group_notes(subject.report, names, groups, subject.name)
        return Side(subject.name, self.top_k, groups, self.pattern, list(self.views.values()), self.losses, notes)


def _count(attended: Callable[[int, int], Tensor], length: int, chunk: int = 1024) -> int:
    starts = range(0, length, chunk)
    return sum(int(attended(start, min(start + chunk, length)).sum()) for start in starts)


def _read_dense(readings: Sequence[_Reading], passage: Passage, place: slice) -> np.ndarray:
    """Read a window as the base model does, and note what it attends to that each side does not."""

    def look(layer: FocusLayer, call: AttentionCall) -> None:
        for row in readings[0].rows[layer]:
            for start, stop, distance, weights in mean_weights(row.part(call), _causal(call)):
                rows = slice(place.start + start, place.start + stop)
                for reading in readings:
                    view = reading.views[row.name]
                    lost = weights * ~reading.attended(row.name)(start, stop)
                    view.lost[rows] = _sum(lost)
                    back, weight = strongest(lost, distance, TARGETS)
                    view.lost_distance[rows], view.lost_weight[rows] = back.cpu().numpy(), weight.cpu().numpy()

    model = readings[0].model
    with attending(model, Mode("dense")):
        return _forward(model, passage, look)


def _causal(call: AttentionCall) -> Callable[[int, int], Tensor]:
    positions = torch.arange(call.query.shape[1], device=call.query.device)
    return lambda start, stop: positions[None, :stop] <= positions[start:stop, None]


def _sum(weights: Tensor) -> np.ndarray:
    return weights.sum(dim=-1).cpu().numpy()


@torch.no_grad()
def _forward(
    model: nn.Module, passage: Passage, look: Callable[[FocusLayer, AttentionCall], None], chunk: int = 512
) -> np.ndarray:
    """Losses of a window's tokens, float32 ``(T,)`` with NaN first; ``look`` sees every routed layer.

    Raises:
        ValueError: a layer's attention cannot be seen.
    """
    seen: set[FocusLayer] = set()

    def note(layer: FocusLayer, call: AttentionCall) -> None:
        seen.add(layer)
        look(layer, call)

    ids = passage.ids.to(device_of(model))
    with attention_calls(model, note):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    if seen != set(focus_layers(model)):
        raise ValueError(f"{type(model).__name__} calls its attention in a way of its own, so it cannot be looked at.")
    losses = np.full(len(ids), np.nan, dtype=np.float32)
    for start in range(0, len(ids) - 1, chunk):  # float32 logits of a whole window can be larger than the model
        targets = ids[start + 1 : start + 1 + chunk]
        found = F.cross_entropy(logits[start : start + len(targets)].float(), targets, reduction="none")
        losses[start + 1 : start + 1 + len(targets)] = found.cpu().numpy()
    return losses
