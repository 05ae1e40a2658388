"""What is measured, and what comes out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..machine import check_device


@dataclass(frozen=True)
class Setting:
    """One benchmark setting.

    Args:
        length: tokens (of the prompt, or cached ones for decoding).
        num_groups, top_k, local_window, sink_tokens: as in `FocusConfig`.
        heads, kv_heads, head_dim: shape of attention.
        dtype: name of a torch dtype.
        device: a torch device.
        kernel: an attention backend, or ``"auto"``.
        seed: of the random tensors and groups.
        pairs: the share that an adapter's dial is turned to, for a context of this length; its own if ``None``.
    """

    length: int
    num_groups: int = 8
    top_k: int = 1
    local_window: int = 128
    sink_tokens: int = 4
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    kernel: str = "auto"
    seed: int = 0
    pairs: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Measurement:
    """What one setting gave.

    Args:
        kind: what was measured: ``attention``, ``decode``, ``prefill``, ``generate``, ``memory``,
            ``serving``, ``first token``.
        setting: where.
        dense, focus: median milliseconds of one call, or bytes.
        limit: the most that skipping pairs can save: pairs possible over pairs attended (of keys, in decoding).
        computed: pairs that kernels compute over pairs possible, ``None`` where not counted.
        baseline: the dense attention compared with.
        path: how Focus was computed.
        shares: share of Focus' time in its steps.
        extra: other figures of the same run, by name.
    """

    kind: str
    setting: Setting
    dense: float
    focus: float
    limit: float | None = None
    computed: float | None = None
    baseline: str = ""
    path: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times faster (or smaller) than dense."""
        return self.dense / self.focus

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        return {"kind": values.pop("kind"), **values.pop("setting"), **values, "ratio": self.ratio}


def grid(
    lengths: Sequence[int],
    num_groups: Sequence[int],
    top_k: Sequence[int],
    local_window: Sequence[int],
    dtypes: Sequence[str],
    **fixed: Any,
) -> Iterator[Setting]:
    """All combinations, those with ``top_k > num_groups`` left out.

    Raises:
        ValueError: a number is out of range, a dtype is unknown, or the device is not there.
    """
    for name, values in (("lengths", lengths), ("num_groups", num_groups), ("top_k", top_k)):
        for value in values:
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}.")
    for window in local_window:
        if window < 0:
            raise ValueError(f"local_window must not be negative, got {window}.")
    heads, kv_heads = fixed.get("heads", Setting.heads), fixed.get("kv_heads", Setting.kv_heads)
    if heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads}).")
    check_device(fixed.get("device", Setting.device))
    for dtype in dtypes:
        if not isinstance(getattr(torch, dtype, None), torch.dtype) or not getattr(torch, dtype).is_floating_point:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}.")
    for dtype, window, groups, k, length in itertools.product(dtypes, local_window, num_groups, top_k, lengths):
        if k <= groups:
            yield Setting(length, groups, k, window, dtype=dtype, **fixed)
