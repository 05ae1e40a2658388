"""What was captured of an attention layer, in memory and in a file of half precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .importance import HeadWindow

#: Largest number that is written, of float16's 65,504.
_LARGEST = 32768.0

#: Follows a tensor's name in that of the number by which it is multiplied when it is read.
_FACTOR = ".factor"


@dataclass(frozen=True)
class LayerWindow:
    """One attention layer over one window of ``T`` tokens, float32; ``R`` of its queries.

    Args:
        keys: ``(H_kv, T, D)``, as they meet queries.
        plain_keys: ``(H_kv, T, D)``, before rotary positions.
        values: ``(H_kv, T, D_v)``.
        positions: int64 ``(R,)``, ascending: the queries that were kept.
        queries: ``(H, R, D)``, as they meet keys.
        gradients: ``(H, R, D_v)``.
        scale, softcap, sink_logits: see `HeadWindow`.
    """

    keys: Tensor
    plain_keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    gradients: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """``H_kv``."""
        return self.keys.shape[0]

    def head(self, number: int) -> HeadWindow:
        """What one KV head sees."""
        group = self.queries.shape[0] // self.num_heads
        mine = slice(number * group, (number + 1) * group)
        return HeadWindow(
            self.positions,
            self.queries[mine],
            self.keys[number],
            self.values[number],
            self.gradients[mine],
            self.scale,
            self.softcap,
            None if self.sink_logits is None else self.sink_logits[mine],
        )


def read(folder: Path, window: int, layer: int) -> LayerWindow:
    """Read what was written for one layer and window.

    Args:
        folder: of the files.
        window: number of the window.
        layer: index of the layer.
    """
    with safe_open(_path(folder, window, layer), framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    factors = {name.removesuffix(_FACTOR): stored.pop(name) for name in list(stored) if name.endswith(_FACTOR)}
    scale, softcap = float(stored.pop("scale")), float(stored.pop("softcap"))
    tensors = {name: tensor.float() * factors[name] if name in factors else tensor for name, tensor in stored.items()}
    return LayerWindow(**tensors, scale=scale, softcap=softcap or None)


def write(folder: Path, window: int, layer: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the fields of a `LayerWindow`: matrices in float16, each times what lets its largest number fit.

    Args:
        folder: of the files.
        window: number of the window.
        layer: index of the layer.
        tensors: by field; ``softcap`` is 0 where there is none.

    Raises:
        OSError: there is no room for them.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            stored[name] = tensor.cpu()
            continue
        factor = tensor.abs().max().float().clamp(min=1e-30) / _LARGEST
        stored[name] = (tensor.float() / factor).half().cpu().contiguous()
        stored[name + _FACTOR] = factor.cpu()
    try:
        save_file(stored, _path(folder, window, layer))
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write to {folder} ({error}): free some space, or name another scratch_dir.") from error


def _path(folder: Path, window: int, layer: int) -> Path:
    return folder / f"{window}-{layer}.safetensors"
