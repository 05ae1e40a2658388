"""The heads of attention modules, which routing by cells needs to know before it has seen them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def head_shape(modules: Sequence[Any]) -> dict[str, int]:
    """Key/value heads, query heads and the size of a head.

    Raises:
        ValueError: the modules do not say, or they differ.
    """
    found = {_shape(module) for module in modules}
    shape = found.pop() if len(found) == 1 else (None, None, None)
    keys, queries, size = shape
    if keys is None or queries is None or size is None or queries % keys:
        raise ValueError(
            f"The layers of {type(modules[0]).__name__} do not have one number and size of heads that their "
            "configuration names, which routing='cells' needs. Use routing='shared'."
        )
    return {"key_value_heads": keys, "query_heads": queries, "head_dim": size}


def _shape(module: Any) -> tuple[int | None, int | None, int | None]:
    config = module.config
    queries = _first(config, "num_attention_heads", "n_head")
    keys = _first(config, "num_key_value_heads") or queries
    size = _first(module, "head_dim", "head_size")
    if size is None and queries is not None:
        width = _first(config, "hidden_size", "n_embd")
        size = _first(config, "head_dim") or (None if width is None else width // queries)
    return keys, queries, size


def _first(where: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(where, name, None), int)), None)
