"""Settings of a loaded adapter: the speed-quality dial, modes, training gates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..attention import PATHS, kernel_named
from ..settings import check_fields
from .config import FocusConfig
from .dial import threshold_for
from .layer import focus_layers

_KEEP: Any = object()

#: See `set_routing`.
MODES = (None, "soft", "hard", "local", "window", "dense")


def set_routing(
    model: nn.Module,
    *,
    pairs: float | None = None,
    threshold: float | None = None,
    length: int | None = None,
    answer_pairs: float | None = _KEEP,
    top_k: int | None = None,
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
        pairs: with ``routing="cells"``, the dial: the share of its pairs that a context attends to, 0 to 1, at any
            length. Less than what window and sinks take cannot be had; 1 is dense attention. Saved with the adapter.
        threshold: the plain number behind it, for all positions; lower reads more.
        length: with ``pairs``: tune the dial to contexts of this many tokens, with one threshold that has them attend
            to so many pairs: shorter ones attend to more then, longer ones to fewer.
        answer_pairs: with ``routing="cells"``, the share of what is before them that the last 64 tokens of every call
            attend to: the end of a prompt, where its question stands, and each token that is generated. ``None``
            goes back to ``pairs``. Not saved, and not in continuous batching.
        top_k: with ``routing="shared"``, groups per token, 1 to its ``num_groups``. More is closer to dense attention
            and slower. Saved with the adapter.
        dense_below: positions below it attend to everything before them, so that contexts of up to so many tokens are
            the base model's, bit for bit and nearly at its speed. Saved with the adapter.
        mode: ``"hard"`` (inference), ``"soft"`` (the attention of training), ``"local"`` (window and sinks
            only, for comparison), ``"window"`` (the same with a window of another width), ``"dense"`` (the model's own
            attention; for whole sequences, without a cache), or ``None``: soft while the centroids train, hard
            otherwise.
        window: width of mode ``"window"``.
        path: how hard attention is computed: ``"auto"`` (the cheapest), or a name in `focus_hf.attention.PATHS`, where
            it can run. All give the same result.
        kernel: the attention backend, a name that ``focus-hf info`` lists, or ``"auto"``.
        gate_strength: ``lambda`` of a soft training gate; ``None`` goes back to the adapter's own.

    Raises:
        ValueError: no Focus adapter, or a value that is out of range.
    """
    layers = focus_layers(model)
    if all(layer.routing_adapter is None for layer in layers):
        warnings.warn("The Focus adapter is not active, so the model runs dense attention.", stacklevel=2)
    if mode is not _KEEP and mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(str(m) for m in MODES)}, got {mode!r}.")
    if (window is None) is (mode == "window") or (window is not None and window < 0):
        raise ValueError(f'mode="window" takes window, a width of at least 0, and no other mode does; got {window!r}.')
    if path is not None and path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    chosen_kernel = None if kernel is None or kernel == "auto" else kernel_named(kernel)
    if gate_strength is not _KEEP and gate_strength is not None and not gate_strength >= 0:
        raise ValueError(f"gate_strength must not be negative, got {gate_strength!r}.")
    for_all = {} if dense_below is None else {"dense_below": dense_below}
    check_fields(for_all, "set_routing")
    active = [layer.configs[name] for layer in layers if (name := layer.routing_adapter) is not None]
    configs = {id(config): config for config in active}.values()  # each once
    # All of them, or nothing changes.
    changes = [dial_changes(config, pairs, threshold, length, top_k) | for_all for config in configs]
    if answer_pairs is not _KEEP and answer_pairs is not None:
        for config in configs:
            _check_share(config, "answer_pairs", answer_pairs)
    for config, change in zip(configs, changes, strict=True):
        for name, value in change.items():
            setattr(config, name, value)
    for layer in layers:
        if mode is not _KEEP:
            layer.mode, layer.window = mode, window
        if answer_pairs is not _KEEP:
            layer.answer_pairs = answer_pairs
        if path is not None:
            layer.path = path
        if kernel is not None:
            layer.kernel = chosen_kernel
        if gate_strength is not _KEEP:
            layer.gate_strength = gate_strength


def dial_changes(
    config: FocusConfig, pairs: float | None, threshold: float | None, length: int | None, top_k: int | None
) -> dict[str, Any]:
    """What to set, by field.

    Raises:
        ValueError: out of range, or not what this adapter's routing has.
    """
    if top_k is not None:
        others = {"pairs": pairs, "threshold": threshold, "length": length}
        if given := [f"{name}={value!r}" for name, value in others.items() if value is not None]:
            raise ValueError(f"Give top_k ({top_k!r}) or {given[0]}, not both: each is the dial of another routing.")
        if config.by_cells:
            raise ValueError(
                f"top_k={top_k!r} is for routing='shared'; this adapter routes by cells: use pairs, as in pairs=0.25."
            )
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= config.num_groups:
            raise ValueError(f"top_k must be an integer from 1 to num_groups ({config.num_groups}), got {top_k!r}.")
        check_fields({"top_k": top_k, "num_groups": config.num_groups}, "set_routing")
        return {"top_k": top_k}
    if pairs is None and threshold is None:
        if length is not None:
            raise ValueError(f"length ({length!r}) tunes pairs, which is not given.")
        return {}
    if pairs is not None and threshold is not None:
        raise ValueError(f"Give pairs ({pairs!r}) or threshold ({threshold!r}), not both.")
    if threshold is not None:
        _check_cells(config, "threshold")
        check_fields({"threshold": threshold}, "set_routing")
        return {"threshold": float(threshold), "pairs": None}
    share = _check_share(config, "pairs", pairs)
    if length is None or share >= 1:
        return {"pairs": share}
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be a number of tokens, got {length!r}.")
    return {"pairs": None, "threshold": threshold_for(config.pairs_curves or {}, length, share)}


def _check_cells(config: FocusConfig, name: str) -> None:
    if not config.by_cells:
        raise ValueError(f"{name} is for routing='cells'; this adapter's routing is shared: use top_k.")


def _check_share(config: FocusConfig, name: str, asked: float | None) -> float:
    """A share of pairs that is asked for, if it is known which threshold that is."""
    _check_cells(config, name)
    check_fields({"pairs": asked}, f"set_routing({name}=...)")
    share = float(asked or 0)
    if not config.pairs_curves and share < 1:
        raise ValueError(
            f"{name}={asked!r}: this adapter has no curves from a fit that say which threshold that is. Use threshold."
        )
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
