"""Which attention modules an adapter routes, and how modules and tensors are called."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import regex
from torch import nn

from ..escape import shown
from .config import FocusConfig
from .discovery import IS_SLIDING, NOT_CAUSAL, find_attention, layer_numbers, why_not

#: Seconds that matching a pattern against all names of a model may take.
_PATTERN_SECONDS = 1.0


def find_targets(model: nn.Module, config: FocusConfig) -> dict[str, Any]:
    """The attention modules that an adapter routes, by name.

    Raises:
        ValueError: there are none; it says what was found instead.
    """
    attention = dict(find_attention(model))
    reasons = {name: why_not(name, module, config.include_sliding_layers) for name, module in attention.items()}
    routable = {name: module for name, module in attention.items() if reasons[name] is None}
    kind = type(model).__name__
    if chosen := _chosen(config, list(routable)):
        _refuse_same_numbers(chosen, layer_numbers(model), kind)
        return {name: routable[name] for name in chosen}
    if not attention:
        raise ValueError(
            f"Found no attention layer in {kind}: Focus needs a transformers model whose attention modules call the "
            "AttentionInterface (most current architectures do)."
        )
    if not routable:
        raise ValueError(_refusal(kind, [str(reason) for reason in reasons.values()]))
    raise ValueError(
        f"target_modules={shown(config.target_modules)} with exclude_modules={shown(config.exclude_modules)} match "
        f"none of the attention layers of {kind}, which are named like {next(iter(routable))!r}."
    )


def _refusal(kind: str, reasons: list[str]) -> str:
    """Why no layer of a model can be routed, and what to do."""
    if all(reason == NOT_CAUSAL for reason in reasons):
        return (
            f"{kind} has no causal self-attention that calls the AttentionInterface (it is an encoder, or its decoder "
            "computes attention by itself), and Focus routes no other. Use a decoder that does, such as most that "
            "AutoModelForCausalLM loads."
        )
    if IS_SLIDING in reasons:
        which = f"All {len(reasons)} attention layers" if len(set(reasons)) == 1 else "Attention layers"
        return (
            f"{which} of {kind} {IS_SLIDING}, and these are left alone. To route them too, use "
            "FocusConfig(include_sliding_layers=True)."
        )
    commonest = max(sorted(set(reasons)), key=reasons.count)
    return f"Focus cannot route {kind}: its attention layers {commonest}."


def _refuse_same_numbers(chosen: Iterable[str], numbers: Mapping[str, int], kind: str) -> None:
    """An adapter knows layers by their numbers, and a cache keeps their keys by them."""
    seen: dict[int, str] = {}
    for name in chosen:
        other = seen.setdefault(numbers[name], name)
        if other != name:
            raise ValueError(
                f"{kind} has several attention layers with the number {numbers[name]} ({other}, {name}), which "
                "Focus cannot tell apart. Choose one stack of layers with target_modules."
            )


def matches(field: str, wanted: str | Iterable[str], names: Iterable[str]) -> list[str]:
    """Which names of modules a field of a configuration means (``target_modules`` or ``exclude_modules``, checked), as
    PEFT understands it: whole names or their ends, or one pattern.

    Raises:
        ValueError: the pattern is not one, or matching it takes longer than a second in all.
    """
    if not isinstance(wanted, str):
        ends = tuple(f".{name}" for name in wanted)
        return [name for name in names if name in wanted or name.endswith(ends)]
    deadline = time.monotonic() + _PATTERN_SECONDS
    try:
        pattern = regex.compile(wanted)
        return [name for name in names if pattern.fullmatch(name, timeout=max(deadline - time.monotonic(), 1e-3))]
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{field}: the pattern {shown(wanted)} is not a regular expression: {error}.") from None
    except TimeoutError:
        raise ValueError(
            f"{field}: the pattern {shown(wanted)} takes longer than {_PATTERN_SECONDS:g} s to match; give a list of "
            "module names instead."
        ) from None


def without_patterns(config: FocusConfig, model: nn.Module, targets: Iterable[str]) -> None:
    """Put the names of the modules that were found in the place of a configuration's patterns, for good.

    So PEFT, which looks into these fields whenever it saves, never meets a stranger's regular expression.
    """
    if isinstance(config.target_modules, str) or isinstance(config.exclude_modules, str):
        prefix = base_prefix(model)
        config.target_modules = [plain_name(name, prefix) for name in targets]
        config.exclude_modules = None


def _chosen(config: FocusConfig, names: list[str]) -> list[str]:
    chosen = names if config.target_modules is None else matches("target_modules", config.target_modules, names)
    excluded = matches("exclude_modules", config.exclude_modules, names) if config.exclude_modules else []
    return [name for name in chosen if name not in excluded]


def base_prefix(model: Any) -> str:
    """What stands before the names in a model that has a head, and not in the same model without one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    prefix = getattr(base, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def plain_name(name: str, prefix: str) -> str:
    """A name without what differs between models of one kind: wrappers, PEFT's prefix, the `base_prefix`."""
    return unwrapped(name).removeprefix("base_model.model.").removeprefix(prefix)


def unwrapped(name: str) -> str:
    """A name without what wrappers of a model add."""
    return regex.sub(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.", "", name)
