"""How much faster Focus should be on a device that is not here: a prediction, from what a call asks of it.

The model, of routing and attention of one layer, beside dense attention:

1. The operations are those that run: the code is called with fake tensors of the length and batch in question, and
   every operation is recorded with the bytes that it moves and its products (`work`). Attention kernels compute whole
   blocks of 128 queries and 128 keys; groups are taken to be balanced.
2. On the device an operation takes the longest of its bytes at 80 % of the bandwidth, its products at 70 % of the peak
   (spread over whole rounds of thread blocks), and 2 microseconds.
3. The host takes 5 microseconds for each operation and runs ahead: a call takes the longer of both sums. In a CUDA
   graph the device's is left.
4. A decoded token is predicted for two ways of storing the cache. On plain storage the operations are recorded, too.
   For a cache stored by groups they are counted (`launches`) as what a layer launches more than with dense attention,
   and the device reads the keys that a query attends to.

On a CPU, host and device take turns. What the model leaves out: caches, other work that would hide the host's, groups
that are not balanced, and that kernels reach less of the peak in short rows. Ratios suffer less than times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from .. import routing
from ..attention import (
    GroupRows,
    Known,
    Problem,
    Scores,
    TokenByRows,
    WhoAttends,
    attend_one_token,
    focus_attention,
)
from .attention import bench_decode
from .devices import HERE, Device, check_devices, find_device
from .launches import count_decode_by_groups
from .settings import Setting
from .stand_in import FlashStandIn
from .timing import interleaved
from .work import Work, WorkRecorder

#: Sequences in a batch.
BATCHES = (1, 8, 64)

#: Width of a layer's centroids.
_GROUP_DIM = 16

_TEMPERATURE = 0.1

PLAIN, BY_GROUPS = "plain cache", "cache by groups"


@dataclass(frozen=True)
class Prediction:
    """Predicted, not measured: one layer's attention on a device, by batch size.

    Args:
        device: what it is predicted for.
        phase: ``"prefill"``, or ``"decode"`` of one token.
        path: how Focus is computed.
        setting: tokens (cached ones in decoding), groups, heads.
        dense, focus: milliseconds.
        recorded: the ratio where a CUDA graph launches everything at once, so that the host costs nothing.
        launches: of Focus; dense attention's are one.
        limit: the most that skipping pairs (keys, in decoding) can give.
        measured: the ratio as measured, where the device is here.
    """

    device: Device
    phase: str
    path: str
    setting: Setting
    limit: float
    dense: dict[int, float] = field(default_factory=dict)
    focus: dict[int, float] = field(default_factory=dict)
    recorded: dict[int, float] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)
    measured: dict[int, float] = field(default_factory=dict)

    @property
    def ratio(self) -> dict[int, float]:
        """How many times faster than dense attention."""
        return {batch: self.dense[batch] / self.focus[batch] for batch in self.dense}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the kind says that it is a prediction."""
        values = asdict(self)
        kind = f"prediction: {values.pop('phase')}"
        return {"kind": kind, **values.pop("setting"), **values, "predicted_ratio": self.ratio}


@torch.no_grad()
def bench_predict(setting: Setting, names: Sequence[str], batches: Sequence[int] = BATCHES) -> Iterator[Prediction]:
    """Predict prefill and decoding on every device, and measure them on the one that is here.

    Args:
        setting: length, groups, heads, dtype; its device is what `devices.HERE` means.
        names: of devices, see `check_devices`.
        batches: to predict for.

    Raises:
        ValueError: there is no such device, or it is not known for this dtype.
    """
    check_devices(names, setting.torch_dtype)
    for name in names:
        device, is_here = find_device(name, setting.device, setting.torch_dtype), name == HERE
        prompts = "grouped" if device.overlaps else "cheapest path"
        for phase, path in (("prefill", prompts), ("decode", PLAIN), ("decode", BY_GROUPS)):
            limit = prefill_limit(setting) if phase == "prefill" else setting.length / keys_read(setting)
            found = Prediction(device, phase, path, setting, limit)
            for batch in batches:
                dense, focus = works(setting, phase, path, batch, on_cpu=is_here and not device.overlaps)
                found.dense[batch], found.focus[batch] = (1e3 * seconds(some, device) for some in (dense, focus))
                found.recorded[batch] = _on_device(dense, device) / _on_device(focus, device)
                found.launches[batch] = len(focus)
                if is_here and (ratio := _measure(setting, phase, path, batch)) is not None:
                    found.measured[batch] = ratio
            yield found


def seconds(works: Sequence[Work], device: Device) -> float:
    """What a call takes: the host's time and the device's, one behind the other or one beside the other."""
    host, on_device = len(works) * device.launch, _on_device(works, device)
    return max(host, on_device) if device.overlaps else host + on_device


def _on_device(works: Sequence[Work], device: Device) -> float:
    return sum(work.seconds(device) for work in works)


def works(setting: Setting, phase: str, path: str, batch: int, *, on_cpu: bool) -> tuple[list[Work], list[Work]]:
    """The operations of dense attention and of Focus.

    Args:
        setting, phase, path, batch: of the call, see `Prediction`.
        on_cpu: as this CPU computes them, on real tensors; otherwise as CUDA does, on fake ones.
    """
    with nullcontext() if on_cpu else FakeTensorMode():
        dense, focus = calls(setting, phase, batch, "cpu", FlashStandIn() if not on_cpu else None)
        found = [_record(dense), _record(focus) if path != BY_GROUPS else []]
    if path == BY_GROUPS:
        kernel = "cpu-flash" if on_cpu else "torch-flash"
        row = 2 * setting.kv_heads * setting.head_dim * setting.torch_dtype.itemsize
        read = Work("keys read", batch * keys_read(setting) * row)
        found[1] = [read] + [Work("around it", 0.0)] * count_decode_by_groups(setting, batch, kernel)
    return found[0], found[1]


def _record(function: Callable[[], Any]) -> list[Work]:
    with WorkRecorder() as recorder:
        function()
    return recorder.works


def calls(
    setting: Setting, phase: str, batch: int, device: str, kernel: FlashStandIn | None
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Dense attention, and Focus with its routing, of random tensors.

    Args:
        setting: of the call.
        phase: see `Prediction`; decoding is on plain storage.
        batch: sequences.
        device: of the tensors.
        kernel: the backend; ``None`` for the device's own, by the path that is taken there.
    """
    length, new = setting.length, setting.length if phase == "prefill" else 1
    dtype, width = setting.torch_dtype, setting.heads * setting.head_dim

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(batch, tokens, count, setting.head_dim, device=device).to(dtype).transpose(1, 2)

    query, key, value = heads(setting.heads, new), heads(setting.kv_heads, length), heads(setting.kv_heads, length)
    hidden = torch.randn(batch, new, width, device=device).to(dtype)
    projection = torch.randn(_GROUP_DIM, width, device=device) * width**-0.5
    centroids = torch.eye(max(setting.num_groups, _GROUP_DIM), _GROUP_DIM, device=device)[: setting.num_groups]
    balance = torch.zeros(setting.num_groups, device=device)
    if phase == "prefill":
        attend = _prompt(setting, (query, key, value), "auto" if kernel is None else "grouped", kernel)
    else:
        attend = _one_token(setting, (query, key, value))

    def focus() -> Tensor:
        return attend(hidden, projection, centroids, balance)

    def dense() -> Tensor:
        repeated = setting.heads != setting.kv_heads
        return F.scaled_dot_product_attention(query, key, value, is_causal=phase == "prefill", enable_gqa=repeated)

    return dense, focus


#: Attention of queries, keys and values, given the hidden states of the queries' tokens, and projection, centroids and
#: balance of the groups.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _prompt(setting: Setting, call: tuple[Tensor, Tensor, Tensor], path: str, kernel: FlashStandIn | None) -> Attend:
    batch, _, length, _ = call[0].shape
    positions = torch.arange(length, device=call[0].device).expand(batch, length)

    def attend(hidden: Tensor, projection: Tensor, centroids: Tensor, balance: Tensor) -> Tensor:
        scores = routing.group_scores(hidden, projection, centroids, _TEMPERATURE)
        memberships = routing.hard_memberships(scores, balance, setting.top_k)
        who = WhoAttends(setting.pattern, positions, memberships, known=Known(setting.top_k, unpadded=True))
        return focus_attention(Problem(*call, who, Scores(setting.head_dim**-0.5)), path=path, kernel=kernel)

    return attend


def _one_token(setting: Setting, call: tuple[Tensor, Tensor, Tensor]) -> Attend:
    """By rows of groups, as `focus_hf.adapter.one_token` does it; the last place is kept for the token itself."""
    query, key, value = call
    shape = query.shape[0], setting.top_k, setting.length - 1
    numbers = torch.randint(setting.num_groups, shape, device=query.device)
    rows = GroupRows(numbers, setting.num_groups, setting.pattern)

    def attend(hidden: Tensor, projection: Tensor, centroids: Tensor, balance: Tensor) -> Tensor:
        scores = routing.balanced_scores(hidden[:, 0], projection, centroids, _TEMPERATURE, balance)
        token = TokenByRows(rows, scores.topk(setting.top_k, dim=-1).indices, setting.length)
        return attend_one_token(query, key, value, token, setting.head_dim**-0.5)

    return attend


def _measure(setting: Setting, phase: str, path: str, batch: int) -> float | None:
    """The ratio on the device that is here; ``None`` where it has no room, or for what is not measured."""
    if path == BY_GROUPS:
        return bench_decode(setting).ratio if batch == 1 else None
    try:
        dense, focus = calls(setting, phase, batch, setting.device, None)
        times = interleaved({"dense": dense, "focus": focus}, setting.device, seconds=2, least=3)
    except torch.OutOfMemoryError:
        return None
    return times["dense"] / times["focus"]


def share_of_pairs(setting: Setting) -> float:
    """How many pairs of tokens share a group, if groups are balanced and chosen independently."""
    groups, each = setting.num_groups, setting.top_k
    return 1.0 - math.comb(groups - each, each) / math.comb(groups, each)


def keys_read(setting: Setting) -> float:
    """Keys that a decoded token attends to."""
    near = min(setting.length, setting.local_window + 1 + setting.sink_tokens)
    return near + share_of_pairs(setting) * (setting.length - near)


def prefill_limit(setting: Setting) -> float:
    """Pairs possible over pairs attended."""
    length, near = setting.length, min(setting.length, setting.local_window + 1 + setting.sink_tokens)
    possible, close = length * (length + 1) / 2, near * (near + 1) / 2 + (length - near) * near
    return possible / (close + share_of_pairs(setting) * (possible - close))
