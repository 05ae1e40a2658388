"""Settings of a loaded adapter: the speed-quality dial, training gates, and a way to look at the routing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..attention import PATHS, HeadClass, WhoAttends, count_pairs, kernel_named, pairs_by_head
from ..settings import check_fields
from .config import FocusConfig
from .decide import MODES
from .find_layers import focus_layers, warn_if_inactive
from .layer import FocusLayer, StandIn

_KEEP: Any = object()


def set_routing(
    model: nn.Module,
    *,
    top_k: int | None = None,
    pairs: float | str | None = None,
    dense_below: int | None = None,
    mode: str | None = _KEEP,
    window: int | None = None,
    path: str | None = None,
    kernel: str | None = None,
    gate_strength: float | None = _KEEP,
) -> None:
    """Change how a model with a Focus adapter routes, at any time.

    Args:
        model: a model with at least one Focus adapter.
        top_k: groups per token for the active adapter, 1 to its ``num_groups``. More is closer to dense attention
            and slower. Saved with the adapter. Where heads have patterns of their own, it is that of all that
            attend by groups.
        pairs: one of the adapter's budgets, by its share of pairs: how each head attends is then as that budget says.
        dense_below: positions below it attend to everything before them, so that contexts of up to so many tokens are
            the base model's, bit for bit and nearly at its speed. Longer ones start with so many dense positions,
            whose pairs the shares in the names of budgets do not include. Saved with the adapter.
        mode: ``"hard"`` (inference), ``"soft"`` (the attention of training), ``"local"`` (window and sinks
            only, for comparison), ``"window"`` (the same with a window of another width), ``"dense"`` (the model's own
            attention; for whole sequences, without a cache), or ``None``: soft while the centroids train, hard
            otherwise.
        window: width of mode ``"window"``.
        path: how hard attention is computed: ``"auto"`` (the cheapest), or ``"grouped"``, ``"biased"``, ``"masked"``
            where it can run. All give the same result.
        kernel: the attention backend, a name that ``focus-hf info`` lists, or ``"auto"``.
        gate_strength: ``lambda`` of a soft training gate; ``None`` goes back to the adapter's own.

    Raises:
        ValueError: no Focus adapter, or a value that is out of range.
    """
    layers = focus_layers(model)
    warn_if_inactive(layers)
    if mode is not _KEEP and mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(str(m) for m in MODES)}, got {mode!r}.")
    if (window is None) is (mode == "window") or (window is not None and window < 0):
        raise ValueError(f'mode="window" takes window, a width of at least 0, and no other mode does; got {window!r}.')
    if path is not None and path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    chosen_kernel = None if kernel is None or kernel == "auto" else kernel_named(kernel)
    if gate_strength is not _KEEP and gate_strength is not None and not gate_strength >= 0:
        raise ValueError(f"gate_strength must not be negative, got {gate_strength!r}.")
    if dense_below is not None:
        check_fields({"dense_below": dense_below}, "set_routing")
    configs = _active_configs(layers)
    if pairs is not None:
        for config in configs:
            find_budget(config, pairs)  # all of them have it, or nothing changes
        for config in configs:
            set_budget(config, pairs)
    if top_k is not None:
        for config in configs:
            set_top_k(config, top_k)
    if dense_below is not None:
        for config in configs:
            config.dense_below = dense_below
    for layer in layers:
        if mode is not _KEEP:
            layer.mode, layer.window = mode, window
        if path is not None:
            layer.path = path
        if kernel is not None:
            layer.kernel = chosen_kernel
        if gate_strength is not _KEEP:
            layer.gate_strength = gate_strength


def _active_configs(layers: list[FocusLayer]) -> list[FocusConfig]:
    """The configurations of the adapters in force, each once."""
    configs = [layer.configs[name] for layer in layers if (name := layer.routing_adapter) is not None]
    return list({id(config): config for config in configs}.values())


def set_top_k(config: FocusConfig, top_k: int) -> None:
    """Let tokens belong to (or read) another number of groups, in all heads that attend by groups.

    Raises:
        ValueError: out of range.
    """
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= config.num_groups:
        raise ValueError(f"top_k must be an integer from 1 to num_groups ({config.num_groups}), got {top_k!r}.")
    config.top_k = top_k
    if config.head_patterns:
        config.head_patterns = {
            name: {**how, "top_k": top_k} if how["attend"] == "groups" else how
            for name, how in config.head_patterns.items()
        }


def set_budget(config: FocusConfig, pairs: float | str) -> None:
    """Let heads attend as one of the adapter's budgets says.

    Raises:
        ValueError: there is no such budget.
    """
    config.head_patterns = copy.deepcopy((config.budgets or {})[find_budget(config, pairs)])


def find_budget(config: FocusConfig, pairs: float | str) -> str:
    """The name of an adapter's budget.

    Args:
        config: of the adapter.
        pairs: share of pairs that the budget is for.

    Raises:
        ValueError: not a share of pairs, or the adapter has no such budget.
    """
    try:
        wanted = float(pairs)
    except (TypeError, ValueError):
        raise ValueError(f"pairs must be a share of pairs such as 0.25, got {pairs!r}.") from None
    shares = sorted(config.budgets or {}, key=float)
    share = next((share for share in shares if math.isclose(float(share), wanted)), None)
    if share is None:
        known = ", ".join(shares) or "none: it has one pattern for all lengths"
        raise ValueError(f"pairs must be one of this adapter's budgets ({known}), got {pairs!r}.")
    return share


@contextmanager
def routing_mode(model: nn.Module, mode: str | None, window: int | None = None) -> Iterator[None]:
    """Within the block, route in this mode (see `set_routing`); afterwards as before."""
    layers = focus_layers(model)
    before = [(layer.mode, layer.window) for layer in layers]
    set_routing(model, mode=mode, window=window)
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer.mode, layer.window = previous


@contextmanager
def routing_by(model: nn.Module, stand_in: StandIn) -> Iterator[None]:
    """Within the block, hard routing takes its groups from other scores than the adapter's.

    Patterns, ``top_k``, paths and the cache stay: what is compared is the choice of groups alone.

    Args:
        model: with a Focus adapter.
        stand_in: gives the scores; a token belongs to the groups with the largest.
    """
    layers = focus_layers(model)
    for layer in layers:
        layer.stand_in = stand_in
    try:
        yield
    finally:
        for layer in layers:
            layer.stand_in = None


@contextmanager
def observe_routing(model: nn.Module, observer: Callable[[Any, Tensor, Tensor], None]) -> Iterator[None]:
    """Within the block, call ``observer(router, scores, memberships)`` at every routing decision.

    The router is the `FocusLayer`; or, for an adapter with ``routing="per_head"``, each of its heads with centroids,
    a `HeadView`: memberships are then those as keys, and `HeadView.reads` says what is read (see also `final_scores`).

    Memberships are the hard ones, in soft mode too. Scores are float32 ``(B, T, K)`` without the balance potentials,
    memberships bool ``(B, T, K)``. Sequences short enough for the base model's own attention are observed too.
    """
    layers = focus_layers(model)
    for layer in layers:
        layer.observer = observer
    try:
        yield
    finally:
        for layer in layers:
            layer.observer = None


@contextmanager
def observe_attention(
    model: nn.Module, observer: Callable[[Any, Tensor, Tensor, float, Tensor], None]
) -> Iterator[None]:
    """Within the block, call ``observer(router, query, key, scale, memberships)`` at every hard attention call.

    The router is as for `observe_routing`; a `HeadView` comes with the queries and keys of its head. ``query`` is
    ``(B, H, Q, D)``, ``key`` ``(B, H_kv, S, D)``, both as they meet (positions applied), ``memberships`` bool
    ``(B, S, K)``. Calls whose pairs are all attended are not routed and not seen. For calls without a cache.
    """
    layers = focus_layers(model)
    for layer in layers:
        layer.attention_observer = observer
    try:
        yield
    finally:
        for layer in layers:
            layer.attention_observer = None


@dataclass
class PairCount:
    """Pairs of the routed layers, added up over layers.

    Args:
        attended: of each layer the mean over its key/value heads.
        possible: all ``j <= i``.
    """

    attended: float = 0.0
    possible: int = 0

    @property
    def share(self) -> float:
        """Share of the possible pairs that are attended.

        Raises:
            ValueError: nothing was counted.
        """
        if not self.possible:
            raise ValueError("No layer was routed: the Focus adapter is not active.")
        return self.attended / self.possible

    def add(self, who: WhoAttends, classes: Sequence[HeadClass] | None) -> None:
        """Count a layer's whole, unpadded sequences.

        Args:
            who: their tokens.
            classes: of the layer's heads, where they do not all attend alike; ``who`` has the columns that they name.
        """
        batch, length = who.positions.shape
        if classes is None:
            self.attended += count_pairs(who.pattern, who.memberships)[0]
        else:
            self.attended += float(pairs_by_head(who, classes).double().mean())
        self.possible += batch * length * (length + 1) // 2


@contextmanager
def observe_pairs(model: nn.Module, first_only: bool = False) -> Iterator[PairCount]:
    """Within the block, count the pairs that routed layers attend to in the mode in force, pair by pair.

    In soft mode they are the pairs of hard memberships. For calls with whole sequences, without padding.

    Args:
        model: with a Focus adapter, whose heads may attend alike or each in its own way.
        first_only: look at the first sequence of each batch; counting can cost more than running the model.

    Yields:
        The counts so far.
    """
    layers = focus_layers(model)
    counted = PairCount()

    def count(who: WhoAttends, classes: Sequence[HeadClass] | None) -> None:
        counted.add(who.sequence(0) if first_only else who, classes)

    for layer in layers:
        layer.pairs_observer = count
    try:
        yield counted
    finally:
        for layer in layers:
            layer.pairs_observer = None
