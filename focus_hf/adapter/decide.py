"""Who decides how a call attends: dense, by groups, or through the gates of training.

A call is dense where every pair is attended: the base model's own attention then computes the same, so short contexts
are bit-identical to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..attention import HeadClass, HeadClasses, Pattern
from .cache import tokens_seen
from .config import FocusConfig

#: ``None`` lets the layer decide: soft while its centroids train, hard otherwise. "local" switches groups off and
#: keeps window and sinks: what is left without the adapter's contribution. "window" is the same with another
#: width. "dense" routes nothing.
MODES = (None, "soft", "hard", "local", "window", "dense")


@dataclass(frozen=True)
class Decision:
    """How a call attends, as far as it is known before its tokens have groups.

    Args:
        soft: with the gates of training.
        dense: every pair is attended, by the base model's own attention.
    """

    soft: bool
    dense: bool


def window_of(config: FocusConfig, mode: str | None, width: int | None) -> Pattern | None:
    """What is left in a mode without groups: a window and sinks, the same for all heads; ``None`` in other modes.

    Args:
        config: of the adapter.
        mode: one of `MODES`.
        width: of mode "window".
    """
    if mode == "window":
        return replace(config.pattern, local_window=config.local_window if width is None else width)
    return config.pattern if mode == "local" else None


def decide(
    config: FocusConfig,
    mode: str | None,
    *,
    learns: bool,
    new_tokens: int,
    cache_layer: Any,
    classes: Sequence[HeadClass] | None = None,
    width: int | None = None,
) -> Decision:
    """How a call attends.

    Args:
        config: of the adapter.
        mode: one of `MODES`; under "dense" the hooks do not ask.
        learns: centroids are being trained.
        new_tokens: of the call.
        cache_layer: the tokens before them; ``None`` without a cache.
        classes: of the layer's heads, where they do not all attend alike.
        width: of mode "window".

    Raises:
        ValueError: soft, and the call continues a cache or the heads do not all attend alike.
    """
    cached_tokens = 0 if cache_layer is None else tokens_seen(cache_layer)
    window = window_of(config, mode, width)
    if classes is None or window is not None:
        dense_length = (window or config.pattern).dense_length
    else:
        dense_length = HeadClasses.of(classes).dense_length
    is_short = cached_tokens + new_tokens <= dense_length
    if mode == "soft" or (mode is None and learns):
        if classes is not None:
            raise ValueError(
                "An adapter whose heads attend in different ways is fitted (focus-hf fit), not trained by gradient. "
                "Load it with is_trainable=False, or route it with focus_hf.set_routing(model, mode='hard')."
            )
        if cached_tokens:
            raise ValueError(
                "Soft routing looks at whole sequences and cannot continue a cache. Generate in hard mode: "
                'focus_hf.set_routing(model, mode="hard").'
            )
        return Decision(soft=True, dense=is_short)
    # Cached tokens may have had fewer groups: `dense_by_groups` knows.
    alike = classes is None and window is None
    everyone_meets = alike and cache_layer is None and any_two_share(config.top_k, config.num_groups)
    return Decision(soft=False, dense=is_short or everyone_meets)


def dense_by_groups(config: FocusConfig, memberships: Tensor, groups_each: int | None = None) -> bool:
    """Whether any two tokens, cached ones included, share a group.

    Args:
        config: of the adapter.
        memberships: bool ``(B, S, K)``; looked at only if nothing else says it.
        groups_each: every token is in exactly this many groups; ``None`` if that is not known.
    """
    if groups_each is not None:
        return any_two_share(groups_each, config.num_groups)
    if not any_two_share(config.top_k, config.num_groups):
        return False
    return any_two_share(int(memberships.sum(dim=-1).min()), config.num_groups)


def any_two_share(groups_each: int, num_groups: int) -> bool:
    """Whether any two tokens share a group, each being in so many of ``num_groups``."""
    return 2 * groups_each > num_groups
