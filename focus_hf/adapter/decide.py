"""How a call attends: by the gates of training, by groups, or with window and sinks alone."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Pattern
from .config import FocusConfig
from .layer import FocusLayer

#: ``None`` lets the layer decide: soft while its centroids train, hard otherwise. "local" switches groups off and
#: keeps window and sinks: what is left without the adapter's contribution. "window" is the same with another
#: width. "dense" routes nothing.
MODES = (None, "soft", "hard", "local", "window", "dense")


def pattern_in_mode(config: FocusConfig, mode: str | None, width: int | None) -> tuple[Pattern, bool]:
    """The pattern in a mode, and whether nobody reads a group in it.

    Args:
        config: of the adapter.
        mode: one of `MODES`.
        width: of mode "window".
    """
    if mode == "window":
        return replace(config.pattern, local_window=config.local_window if width is None else width), True
    return config.pattern, mode == "local"


def is_soft(router: FocusLayer, adapter_name: str, *, cached_tokens: int) -> bool:
    """Whether a call goes through the gates of training.

    Args:
        router: of the layer.
        adapter_name: whose centroids.
        cached_tokens: that the call continues.

    Raises:
        ValueError: soft, and the call continues a cache or the adapter routes by cells.
    """
    if router.mode != "soft" and (
        router.mode is not None or not router.learns(adapter_name, starts=not cached_tokens)
    ):
        return False
    if router.configs[adapter_name].by_cells:
        raise ValueError(
            "An adapter that routes by cells is fitted (focus-hf fit), not trained by gradient, and has no soft mode. "
            'Route it with focus_hf.set_routing(model, mode="hard").'
        )
    if cached_tokens:
        raise ValueError(
            "Soft routing looks at whole sequences and cannot continue a cache. Generate in hard mode: "
            'focus_hf.set_routing(model, mode="hard").'
        )
    return True
