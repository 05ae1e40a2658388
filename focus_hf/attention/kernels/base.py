"""What a backend must offer: attention over ragged rows that also returns its logsumexp, forward and backward.

By their logsumexps, results over disjoint sets of keys are merged into one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

#: A pair lowered by this much, after scaling, has a softmax weight of exactly 0 in float32.
PENALTY = 4096.0

#: Output ``(Tq, H, D_v)`` in the dtype of the query, and logsumexp ``(Tq, H)``, at least float32.
Result = tuple[Tensor, Tensor]

#: Gradients of query, key and value.
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Row ``r`` has the queries ``query_offsets[r] : query_offsets[r + 1]`` and the keys alike.

    The queries of a row are its *last* tokens: causal attention in a row is aligned at the bottom right.
    """

    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]
    device: torch.device

    def lengths(self) -> Iterator[tuple[slice, slice]]:
        """The query slice and the key slice of each row."""
        for row in range(len(self.query_offsets) - 1):
            yield (
                slice(self.query_offsets[row], self.query_offsets[row + 1]),
                slice(self.key_offsets[row], self.key_offsets[row + 1]),
            )

    @functools.cached_property
    def cu_queries(self) -> Tensor:
        """Query offsets as kernels take them: int32 ``(R + 1,)`` on the device."""
        return torch.tensor(self.query_offsets, dtype=torch.int32, device=self.device)

    @functools.cached_property
    def cu_keys(self) -> Tensor:
        """Key offsets, likewise."""
        return torch.tensor(self.key_offsets, dtype=torch.int32, device=self.device)

    @property
    def longest_query(self) -> int:
        return max(q.stop - q.start for q, _ in self.lengths())

    @property
    def longest_key(self) -> int:
        return max(k.stop - k.start for _, k in self.lengths())

    @classmethod
    def single(cls, queries: int, keys: int, device: torch.device) -> Rows:
        """One row."""
        return cls((0, queries), (0, keys), device)


@dataclass(frozen=True)
class Call:
    """Which pairs one kernel call attends to.

    Args:
        rows: causal inside each row, aligned at the bottom right (its queries are its last tokens). Every row has
            a query, and at least as many keys as queries.
        scale: factor on ``q . k``.
        causal: ``False`` if every query of a row sees all its keys, however many.
        window: a query sees itself and this many tokens before it; ``None`` for all of them.
        exclude: bool ``(Tq, C)`` and ``(Tk, C)``: a pair that has a column in common is left out. A query with
            nothing left gets a logsumexp far below any other, and any output.
    """

    rows: Rows
    scale: float
    window: int | None = None
    exclude: tuple[Tensor, Tensor] | None = None
    causal: bool = True


class Kernel(ABC):
    """Attention over ragged rows, token-major: queries ``(Tq, H, D)``, keys and values ``(Tk, H_kv, D)``.

    The backward takes the output and logsumexp of the *whole* attention of which this call computes a part, as in
    ring attention; so parts never need a gradient through a logsumexp, which no kernel offers.
    """

    #: What `focus-hf info` and ``set_routing(kernel=...)`` call it.
    name: ClassVar[str]

    #: Calls have exactly one row: gathered and computed one after the other, rows stay in a CPU's caches.
    one_row_at_a_time: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Why this backend cannot run on this machine, in a few words; ``None`` if it can."""

    @abstractmethod
    def unsupported(self, query: Tensor, value: Tensor) -> str | None:
        """Why it cannot run on tensors like these, in a few words; ``None`` if it can."""

    @abstractmethod
    def _forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        """`forward` without exclusions."""

    @abstractmethod
    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        """`backward` without exclusions."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Result:
        """Attention over the call's pairs."""
        if call.exclude is not None:
            query, key = _penalise(query, key, call.exclude, call.scale)
        return self._forward(query, key, value, call)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> Gradients:
        """Gradients of `forward`'s tensors, given gradient, output and logsumexp of the whole attention."""
        head_dim = query.shape[-1]
        if call.exclude is not None:
            query, key = _penalise(query, key, call.exclude, call.scale)
        dq, dk, dv = self._backward(grad, query, key, value, output, lse, call)
        return dq[..., :head_dim], dk[..., :head_dim], dv


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        output_a, output_b: ``(..., D)``.
        lse_a, lse_b: ``(...)``; ``-inf`` where there are no keys in that set.

    Returns:
        Output ``(..., D)`` and logsumexp ``(...)``, in the dtype of the logsumexps.
    """
    share_of_b = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)  # NaN: neither has keys
    output = torch.lerp(output_a.to(lse_a.dtype), output_b.to(lse_a.dtype), share_of_b[..., None])
    return output, torch.logaddexp(lse_a, lse_b)


def _penalise(query: Tensor, key: Tensor, exclude: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Lengthen the heads so that the score falls by `PENALTY` for each column two tokens have in common."""
    # Half of the penalty on each side, as a power of two: exact in bf16, in range for fp16.
    magnitude = 2.0 ** min(math.ceil(math.log2(PENALTY / scale) / 2), 15)
    return lengthen(query, exclude[0] * -magnitude), lengthen(key, exclude[1] * magnitude)


def lengthen(states: Tensor, columns: Tensor) -> Tensor:
    """Columns ``(T, C)`` behind each head of ``(T, H, D)``, and zeros up to a multiple of 8, which kernels want."""
    columns = F.pad(columns.to(states.dtype), (0, -(states.shape[-1] + columns.shape[-1]) % 8))
    return torch.cat([states, columns[:, None].expand(-1, states.shape[1], -1)], dim=-1)


def pad_heads(tensor: Tensor, head_dim: int) -> Tensor:
    """Zeros behind each head's values, for kernels that want values as wide as keys."""
    return tensor if tensor.shape[-1] == head_dim else F.pad(tensor, (0, head_dim - tensor.shape[-1]))


@functools.cache
def triton_missing() -> str | None:
    """Why our Triton kernels cannot run; ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    return None if int(version.split(".")[0]) >= 3 else f"triton {version} is too old, 3.0 is needed"
