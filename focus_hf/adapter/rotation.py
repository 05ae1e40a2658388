"""Keys before rotary positions: the keys of a cache, turned back.

A key's content is what its group is made of; where it stands is the query's business (`focus_hf.routing.cells`). Keys
are cached with their positions applied, so they are turned back by the model's own function, with the angles of where
they stand.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..routing.shared import at_least_float32
from .remembered import version

#: Names of the functions by which attention modules turn queries and keys, in their own files.
_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


def turned_back(attention: nn.Module, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys as they were before positions were applied to them.

    Args:
        attention: the module whose keys they are.
        keys: ``(B, H_kv, S, D)``.
        cos, sin: of their positions, ``(B or 1, S, n)``, as the module is passed them.

    Returns:
        float32 or float64 ``(B, H_kv, S, D)``; the keys themselves where no function can be asked.
    """
    turn, keys = _function(type(attention).forward), at_least_float32(keys)
    if turn is None or cos.dim() != 3 or cos.shape[-1] > keys.shape[-1]:
        return keys
    cos, sin = _reversed(cos, sin)
    width = _turned(attention, keys, cos)
    own = keys[..., :width]
    back = turn(own[:, :0], own, cos, sin)[1]
    return back if width == keys.shape[-1] else torch.cat([back, keys[..., width:]], dim=-1)


#: The last angles that were reversed, and what they were reversed to: all layers are passed the same.
_LAST: ContextVar[tuple[Tensor, Tensor, int, tuple[Tensor, Tensor]] | None] = ContextVar("focus_angles", default=None)


def _reversed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The angles that undo angles, float32 or float64."""
    compiling = torch.compiler.is_compiling()
    last = None if compiling else _LAST.get()
    if last is not None and last[0] is cos and last[1] is sin and last[2] == version(cos):
        return last[3]
    own, other = at_least_float32(cos), at_least_float32(sin)
    square = own.square() + other.square()  # 1, but where lengths are scaled, too
    found = own / square, -other / square
    if not compiling and not cos.is_inference():  # a write in place to such a tensor is not counted
        _LAST.set((cos, sin, version(cos), found))
    return found


def _turned(attention: nn.Module, keys: Tensor, cos: Tensor) -> int:
    """How many numbers of a head have positions applied (partial rotary positions: the first ones)."""
    return cos.shape[-1] if cos.shape[-1] < keys.shape[-1] and hasattr(attention, "rotary_ndims") else keys.shape[-1]


@functools.lru_cache(maxsize=64)
def _function(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function by which attention modules with this forward turn queries and keys."""
    names = getattr(inspect.unwrap(forward), "__globals__", {})
    found = next((names[name] for name in _FUNCTIONS if name in names), None)
    if found is None:
        return None
    parameters = list(inspect.signature(found).parameters)
    return found if parameters[:4] == ["q", "k", "cos", "sin"] else None


def find_rotary(model: nn.Module, attention: nn.Module) -> nn.Module | None:
    """The module of a model that makes the angles which an attention module is passed."""
    candidates = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    own = [module for module in attention.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    found = own or candidates
    return found[0] if found else None


def angles(
    rotary: nn.Module, attention: Any, positions: Tensor, passed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of positions, as the model makes them.

    Args:
        rotary: from `find_rotary`.
        attention: the module that is called.
        positions: ``(B, S)``, of which the last are those of the new tokens.
        passed: cosines and sines of the new tokens, which these must agree with.

    Returns:
        ``(B, S, n)`` each, or ``None`` where this is not how the model makes them.
    """
    like = passed[0]
    layer_type = getattr(attention, "layer_type", None)
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    found = rotary(like, positions, layer_type) if takes_type else rotary(like, positions)
    if not isinstance(found, tuple | list) or len(found) != 2 or found[0].dim() != 3:
        return None
    cos, sin = found
    return (cos, sin) if cos.shape[-1] == like.shape[-1] else None
