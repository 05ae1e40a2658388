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
    """Keys ``(B, H_kv, S, D)`` before positions were applied to them, float32 or float64; themselves where that cannot
    be asked.

    Args:
        attention: the module whose keys they are.
        cos, sin: of their positions, ``(B or 1, S, n)``, as the module is passed them.
    """
    turn, keys = _function(type(attention).forward), at_least_float32(keys)
    if turn is None or cos.dim() != 3 or cos.shape[-1] > keys.shape[-1]:
        return keys
    cos, sin = _reversed(cos, sin)
    width = keys.shape[-1]
    if hasattr(attention, "rotary_ndims"):  # partial rotary positions: the first numbers of a head
        width = cos.shape[-1]
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
    both = (*attention.modules(), *model.modules())
    return next((module for module in both if type(module).__name__.endswith("RotaryEmbedding")), None)


def angles(
    rotary: nn.Module | None, attention: nn.Module, positions: Tensor, passed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines ``(B, S, n)`` of positions, as the model makes them; ``None`` where it makes them otherwise.

    Args:
        rotary: from `find_rotary`.
        attention: the module that is called.
        positions: ``(B, S)``.
        passed: cosines and sines that it was passed, for the new tokens.
    """
    if rotary is None:
        return None
    layer_type = getattr(attention, "layer_type", None)
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    found = rotary(passed[0], positions, layer_type) if takes_type else rotary(passed[0], positions)
    fits = isinstance(found, tuple | list) and len(found) == 2 and found[0].dim() == 3
    return (found[0], found[1]) if fits and found[0].shape[-1] == passed[0].shape[-1] else None
