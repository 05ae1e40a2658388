"""Calls of the Triton kernels beside dense attention, on random tensors that read a given share of their pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from focus_hf.attention.kernels import triton_gather, triton_prompt
from focus_hf.bench import Setting
from focus_hf.bench.attention import dense_functions
from focus_hf.bench.timing import interleaved

from .work import BANDS

#: Of 64 consecutive tokens each cell is read at a rate of its own, drawn from a beta distribution with this first
#: number: 8, 16, 32, 64 tokens then read together 2.2, 2.7, 3.0, 3.4 times what each reads, where that is a tenth; on
#: text 2.1, 2.7, 3.3, 3.8 times (`work.TOGETHER`).
ALIKE, SHAPE = 64, 0.08

#: Bytes of keys and values of the layers that take turns: more than a GPU's caches hold.
TURN_BYTES = 4e8

Function = Callable[[], Tensor]


@dataclass(frozen=True)
class Measured:
    """What one call takes on the GPU that is here.

    Args:
        by: the fastest dense attention.
        dense, focus: milliseconds on the device, in a CUDA graph.
        dense_launched, focus_launched: launched one by one, the host's time included.
    """

    by: str
    dense: float
    focus: float
    dense_launched: float
    focus_launched: float


def random_reads(shape: tuple[int, ...], share: float, device: str) -> Tensor:
    """Cells that queries read, consecutive ones about as alike as on text: bool ``(B, H_kv, Q, K, bands)``.

    Args:
        shape: of it.
        share: that a query reads, above 0 and below 1.
        device: where.
    """
    reads = torch.empty(shape, dtype=torch.bool, device=device)
    rates = torch.distributions.Beta(*torch.tensor([SHAPE, SHAPE / share - SHAPE], device=device))
    for head in reads.flatten(0, 1):
        rate = rates.sample((-(-shape[2] // ALIKE), *shape[3:])).repeat_interleave(ALIKE, dim=0)[: shape[2]]
        head.copy_(torch.rand_like(rate) < rate)
    return reads


def calls(setting: Setting, phase: str, batch: int, share: float) -> tuple[dict[str, Function], Function]:
    """Dense attentions by name, and Focus given groups and tables.

    Args:
        setting: of the call; its device is a GPU.
        phase: ``"prefill"``, or ``"decode"`` of one token.
        batch: sequences.
        share: of the cells that a query reads.
    """
    length, device, dtype = setting.length, setting.device, setting.torch_dtype
    new, groups = (length if phase == "prefill" else 1), setting.num_groups

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(batch, count, tokens, setting.head_dim, device=device, dtype=dtype)

    query, key, value = heads(setting.heads, new), heads(setting.kv_heads, length), heads(setting.kv_heads, length)
    key_groups = torch.randint(groups, key.shape[:3], dtype=torch.uint8, device=device)
    reads = random_reads((batch, setting.kv_heads, new, groups, BANDS), share, device)
    last = torch.full((batch, 1), length - 1, device=device)
    scale, window, sinks = setting.head_dim**-0.5, setting.local_window, setting.sink_tokens

    def focus() -> Tensor:
        tensors = query, key, value, key_groups, reads
        if phase == "decode":
            return triton_gather.sparse_decode(*tensors, last, scale=scale, local_window=window, sink_tokens=sinks)
        return triton_prompt.sparse_prompt(*tensors, scale=scale, local_window=window, sink_tokens=sinks)[0]

    return dense_functions(query, key, value, causal=phase == "prefill"), focus


@torch.no_grad()
def measure(setting: Setting, phase: str, batch: int, share: float) -> Measured | None:
    """Attention on the GPU that is here, without routing; ``None`` where it has no room.

    Args:
        setting, phase, batch, share: see `calls`.
    """
    cache = 2 * batch * setting.length * setting.kv_heads * setting.head_dim * setting.torch_dtype.itemsize
    layers = max(1, min(8, int(TURN_BYTES / cache)))
    try:
        made = [calls(setting, phase, batch, share) for _ in range(layers)]
        names = made[0][0]
        dense = {name: device_ms([layer[name] for layer, _ in made]) for name in names}
        focus = device_ms([layer for _, layer in made])
        by = min(dense, key=lambda name: dense[name])
        launched = interleaved({"dense": names[by], "focus": made[0][1]}, setting.device, seconds=0.5, least=3)
    except torch.OutOfMemoryError:
        return None
    return Measured(by, dense[by], focus, launched["dense"], launched["focus"])


def device_ms(functions: Sequence[Function], seconds: float = 0.4, least: int = 3, most: int = 20) -> float:
    """Milliseconds of one of these calls, recorded one after the other in a CUDA graph: the median of its replays."""
    graph = torch.cuda.CUDAGraph()
    for function in functions:  # compile, choose
        function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    graph.replay()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < seconds and len(times) < most):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(functions))
    return median(times)
