"""The base model's own eager attention, told by a mask which pairs Focus attends: slow, and not Focus' code.

Nothing is shared with what it judges but the memberships, which Focus decides: masks are the base model's without the
pairs that the definition leaves out, and attention is the function of the base model's own file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def allowed(memberships: Tensor, window: int, sinks: int) -> Tensor:
    """Who attends to whom, as docs/method.md says it: bool ``(B, T, T)`` from memberships bool ``(B, T, K)``.

    A loop over tokens, not an expression over matrices, so that it is not the package's definition once more.
    """
    batch, length, _ = memberships.shape
    pairs = torch.zeros(batch, length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            near = i - j <= window or j < sinks
            pairs[:, i, j] = True if near else (memberships[:, i] & memberships[:, j]).any(dim=-1)
    return pairs


@contextmanager
def eager_with(pairs: dict[Any, list[Tensor]]) -> Iterator[list[Tensor]]:
    """Within the block, eager attention of these modules attends to these pairs only.

    Args:
        pairs: by attention module, bool ``(B, T, T)`` for each of its calls (some models run a module several times).

    Yields:
        Which of them were asked for, as they come; more than once by modules that attend twice in a call.
    """
    files = {type(module).__module__ for module in pairs}
    originals = {name: sys.modules[name].eager_attention_forward for name in files}  # type: ignore[attr-defined]
    asked: list[Tensor] = []
    calls = {module: iter(each) for module, each in pairs.items()}

    current: dict[Any, Tensor] = {}

    def starts(module: Any, _: Any) -> None:
        current[module] = next(calls[module])

    def make(original: Any) -> Any:
        def attend(
            module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None = None, *a: Any, **k: Any
        ) -> Any:
            mask = attention_mask
            if (own := current.get(module)) is not None:
                asked.append(own)
                forbidden = torch.zeros_like(own, dtype=query.dtype).masked_fill(~own, -torch.inf)[:, None]
                if mask is None:
                    mask = forbidden
                elif mask.dtype == torch.bool:
                    mask = mask & own[:, None]
                else:
                    mask = mask[..., : own.shape[-1]] + forbidden
            return original(module, query, key, value, mask, *a, **k)

        return attend

    for name, original in originals.items():
        sys.modules[name].eager_attention_forward = make(original)
    handles = [module.register_forward_pre_hook(starts) for module in pairs]
    try:
        yield asked
    finally:
        for handle in handles:
            handle.remove()
        for name, original in originals.items():
            sys.modules[name].eager_attention_forward = original
