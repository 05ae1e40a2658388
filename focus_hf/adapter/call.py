"""What an attention call is told about groups, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from ..attention import HeadClass, HeadClasses, Kernel, OneToken, Pattern
from .packed import PagedCall


@dataclass(frozen=True)
class SoftGate:
    """What training adds to a routing: assignments ``(B, T, K)`` with a gradient, and the gate they drive."""

    assignments: Tensor
    name: str
    strength: float


@dataclass(frozen=True)
class Routing:
    """What an attention call needs to know about groups.

    Args:
        pattern: window, sinks, dense start.
        memberships: bool ``(B, tokens seen, K)``, cached tokens included; of the new tokens only if ``in_stores``.
        top_k: groups per token.
        path: a name in `focus_hf.attention.PATHS`.
        kernel: the backend; ``None`` for the best one.
        soft: set in training.
        cache_layer: where the tokens are cached, if they are.
        in_stores: the cache layer is stored by groups.
        owner: the adapter.
        classes: of the layer's heads, where they do not all attend alike; memberships have the columns that they name.
        reads: bool ``(B, T, K)``, the groups whose keys the new tokens attend to, where these are not their own.
        groups_each: every token seen is in exactly this many groups; ``None`` if that is not known.
        attention_observer: told query, key, scale and memberships of the call, see `observe_attention`.
        paged: set in continuous batching; memberships are then those of the new tokens alone.
    """

    pattern: Pattern
    memberships: Tensor
    top_k: int
    path: str = "auto"
    kernel: Kernel | None = None
    soft: SoftGate | None = None
    cache_layer: Any = None
    in_stores: bool = False
    owner: object = None
    classes: HeadClasses | None = None
    reads: Tensor | None = None
    groups_each: int | None = None
    attention_observer: Callable[[Tensor, Tensor, float, Tensor], None] | None = None
    paged: PagedCall | None = None


@dataclass(frozen=True)
class OneTokenRouting:
    """A `Routing` of one new token for each sequence, in a layer in plain storage, by the numbers of groups.

    Args:
        token: the groups of all tokens, and what the new ones read.
        pattern, cache_layer, classes, groups_each: as in `Routing`.
        spelled_out: makes it one.
    """

    token: OneToken
    pattern: Pattern
    cache_layer: Any
    classes: HeadClasses | None
    groups_each: int
    spelled_out: Callable[[], Routing]


class Dense(Enum):
    """Of a call that attends to everything: the base model's own attention answers it."""

    CALL = "dense"


def groups_each(top_k: int, classes: Sequence[HeadClass] | None, reads: Tensor | None) -> int | None:
    """In how many groups each new token of a call is, as `Routing.groups_each` has it.

    Args:
        top_k: of the adapter.
        classes: of the layer's heads, where they do not all attend alike.
        reads: set with routing per head: a token is then in one group of each head.
    """
    if reads is not None:
        return 1
    return top_k if classes is None else None


class RoutedConfig:
    """An attention module's own config for the length of one call, naming our function and carrying the routing.

    The attention interface passes no hidden states, but it does pass the module; the base model's config, and with
    it the way masks are made, stays as it is.
    """

    _attn_implementation = "focus"

    def __init__(self, config: Any, routing: Routing | OneTokenRouting) -> None:
        self.original = config
        self.routing = routing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
