"""Ways to look at what an adapter does: its routing, its attention calls, the pairs that it attends to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention import Pattern, Problem, WhoAttends, by_memberships, count_pairs, read_by_any
from ..routing.cells import key_scores
from .call import Call
from .config import FocusConfig
from .layer import FocusLayer, focus_layers
from .routers import Routed, own_heads, plain_keys


@dataclass(frozen=True)
class Seen(Problem):
    """A hard attention call, as those who observe it see it: what is computed, and the layer whose it is."""

    layer: FocusLayer

    @property
    def scale(self) -> float:
        """Factor on ``q . k``."""
        return self.scores.scale


@dataclass(frozen=True)
class HeadView:
    """One key/value head of a layer that routes by itself, as observers see it in the layer's place.

    Args:
        name: of the attention module, with the head.
        layer_idx: index of the layer.
        head: which key/value head.
        routing_config: of the adapter in force.
        reads: what any of its query heads reads for each token of the call, bool ``(B, T, K, bands)``.
    """

    name: str
    layer_idx: int
    head: int
    routing_config: FocusConfig = field(compare=False, repr=False)
    reads: Tensor = field(compare=False, repr=False)

    @property
    def pattern(self) -> Pattern:
        """Its window, sinks, dense start and bands."""
        return self.routing_config.pattern


#: What routes tokens: a layer for all of its heads, or one head for itself.
Router = FocusLayer | HeadView


def final_scores(router: Router, scores: Tensor) -> Tensor:
    """The scores by which a token's groups are chosen, made of those that `observe_routing` gives.

    Args:
        router: whose they are. Scores of a head hold its balance potentials, those of a layer do not.
        scores: float32 ``(..., K)``.
    """
    if isinstance(router, HeadView):
        return scores
    return scores + router.focus_balance[str(router.routing_adapter)].detach().float().to(scores.device)


def groups_read(router: Router, memberships: Tensor) -> Tensor:
    """The groups whose keys tokens attend to, at any distance: bool ``(B, T, K)``."""
    return router.reads.any(dim=-1) if isinstance(router, HeadView) else memberships


def who_attends(router: Router, memberships: Tensor) -> WhoAttends:
    """Who attends to whom, by what `observe_routing` gives of whole sequences: of one head, or of all alike.

    Args:
        router: a layer or a head.
        memberships: bool ``(B, T, K)``.
    """
    batch, length, _ = memberships.shape
    positions = torch.arange(length, device=memberships.device).expand(batch, length)
    if isinstance(router, HeadView):
        groups = memberships.int().argmax(dim=-1)[:, None]
        return WhoAttends(router.pattern, positions, groups, router.reads[:, None], first_position=0)
    groups, reads = by_memberships(memberships, length)
    pattern = router.routing_config.pattern
    return WhoAttends(pattern, positions, groups, reads, first_position=0, memberships=memberships)


@contextmanager
def observe_routing(model: nn.Module, observer: Callable[[Any, Tensor, Tensor], None]) -> Iterator[None]:
    """Within the block, call ``observer(router, scores, memberships)`` at every routing decision.

    The router is the `FocusLayer`; or, with ``routing="cells"``, each of its key/value heads, a `HeadView`:
    memberships are then those as keys, and `HeadView.reads` says what is read (see also `final_scores`,
    `who_attends`).

    Memberships are the hard ones, in soft mode too. Scores are float32 ``(B, T, K)`` without the balance potentials of
    a layer, memberships bool ``(B, T, K)``. Sequences short enough for the base model's own attention are observed
    too; with cells they then run ours, which attends to the same pairs. For calls without a cache.
    """
    layers = focus_layers(model)
    before = [layer.observer for layer in layers]
    for layer in layers:
        layer.observer = observer
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer.observer = previous


def tell_routing(call: Call, key: Tensor, routed: Routed) -> None:
    """Tell who observes the routing of a layer whose heads route by themselves."""
    router, config, (groups, reads, _) = call.router, call.config, routed
    scores = key_scores(plain_keys(call, key, key.shape[2]), own_heads(call, key.shape[1]))
    members = torch.nn.functional.one_hot(groups.long(), config.num_groups).bool()
    assert router.observer is not None
    of_key_heads = read_by_any(reads, key.shape[1])
    for head in range(key.shape[1]):
        view = HeadView(f"{router.name}.{head}", router.layer_idx, head, config, of_key_heads[:, head])
        router.observer(view, scores[:, head], members[:, head])


@contextmanager
def observe_attention(model: nn.Module, observer: Callable[[Seen], None]) -> Iterator[None]:
    """Within the block, call ``observer`` with every attention call of routed layers (`Seen`).

    Calls whose pairs are all attended are seen, too: they then run our attention in the place of the base model's.
    """
    layers = focus_layers(model)
    for layer in layers:
        layer.attention_observers = (*layer.attention_observers, observer)
    try:
        yield
    finally:
        for layer in layers:
            layer.attention_observers = tuple(one for one in layer.attention_observers if one is not observer)


def tell_attention(call: Call, problem: Problem) -> None:
    """Tell who observes attention of a call."""
    for observer in call.router.attention_observers:
        observer(Seen(**vars(problem), layer=call.router))


@dataclass
class PairCount:
    """Pairs of the routed layers, added up over layers.

    Args:
        attended: of each layer the mean over its heads.
        loaded: the same if every query head read what any head of its key/value head reads: keys come from memory once
            for all of them.
        possible: all pairs of dense attention.
    """

    attended: float = 0.0
    loaded: float = 0.0
    possible: int = 0

    #: What to say if nothing was counted.
    nothing: ClassVar[str] = "No layer was routed: the Focus adapter is not active."

    @property
    def share(self) -> float:
        """Share of the possible pairs that are attended.

        Raises:
            ValueError: nothing was counted.
        """
        return self._of_possible(self.attended)

    @property
    def loaded_share(self) -> float:
        """Share of the keys that have to be loaded; as `share`."""
        return self._of_possible(self.loaded)

    def _of_possible(self, pairs: float) -> float:
        if not self.possible:
            raise ValueError(self.nothing)
        return pairs / self.possible

    def add(self, who: WhoAttends) -> None:
        """Count a layer's call."""
        if who.memberships is not None and who.key_groups.shape[1] > 1:  # all heads alike
            who = replace(who, key_groups=who.key_groups[:, :1], reads=who.reads[:, :1])
        attended, possible = count_pairs(who)
        together = read_by_any(who.reads, who.key_groups.shape[1])
        loaded = attended if together is who.reads else count_pairs(replace(who, reads=together))[0]
        self.attended += float(attended.double().mean())
        self.loaded += float(loaded.double().mean())
        self.possible += possible


@contextmanager
def observe_pairs(model: nn.Module, first_only: bool = False) -> Iterator[PairCount]:
    """Within the block, count the pairs that routed layers attend to in the mode in force (soft: by hard memberships).

    Args:
        model: with a Focus adapter.
        first_only: look at the first sequence of each batch; counting can cost more than running the model.

    Yields:
        The counts so far.
    """
    counted = PairCount()
    with observe_attention(model, lambda seen: counted.add(seen.who.sequence(0) if first_only else seen.who)):
        yield counted
