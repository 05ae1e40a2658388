"""How much faster Focus should be on a GPU that is not here: a prediction, from what the kernels ask of it.

The model, of routing and attention of one layer where a query reads a tenth of its pairs, beside dense attention:

1. A launch's bytes and products are counted from shapes (`work`): of a token a byte of every key, and the keys that it
   reads; of a prompt, whole tiles of what 32 or so consecutive tokens read together, which is measured on text.
2. On the device a launch takes the longest of its bytes at 80 % of the bandwidth (gathered rows: 70 %), what it takes
   from the second-level cache, its products at the share of the peak that kernels of its kind reach, and 2
   microseconds.
3. The host takes 5 microseconds for each launch and runs ahead: a call takes the longer of both sums. In a CUDA graph
   the device's is left.

What it leaves out: other work that would hide the host's, tails of the last programs, heads that read more than
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from focus_hf.bench import Setting

from .devices import HERE, Device, check_devices, find_device
from .work import Work, decode_work, dense_work, prompt_work, routing_work

if TYPE_CHECKING:
    from .kernels import Measured  # needs Triton

#: Sequences in a batch.
BATCHES = (1, 8, 64)

#: Pairs that are read, the window's and sinks' among them.
PAIRS = 0.1

#: Dense attention of a prompt, and what it reaches of the peak with heads of 128 at 16k tokens: FlashAttention 3 on an
#: H100, 621 of 989 TFLOPS, of pytorch/benchmark pull request 2391; 2 there, 370, of arXiv 2407.08608; cuDNN on an
#: H200, 590, measured; the others of their authors.
DENSE = {
    "A100": {"FlashAttention 2": 0.7},
    "H100": {"FlashAttention 3": 0.63, "FlashAttention 2": 0.37},
    "H200": {"cuDNN": 0.6},
    "B200": {"FlashAttention 4": 0.71},
}


@dataclass(frozen=True)
class Prediction:
    """Predicted, not measured: one layer's attention on a device, by batch size.

    Args:
        device: what it is predicted for.
        phase: ``"prefill"``, or ``"decode"`` of one token.
        path: the dense attention beside it.
        setting: tokens (cached ones in decoding), groups, heads.
        dense, focus: milliseconds.
        recorded: the ratio where a CUDA graph launches everything at once, so that the host costs nothing.
        launches: of Focus with its routing; dense attention's are one or two.
        limit: the most that skipping pairs (keys, in decoding) can give.
        measured: of attention without routing, where the device is here and has room.
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
    measured: dict[int, Measured] = field(default_factory=dict)

    @property
    def ratio(self) -> dict[int, float]:
        """How many times faster than dense attention."""
        return {batch: self.dense[batch] / self.focus[batch] for batch in self.dense}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the kind says that it is a prediction."""
        values = asdict(self)
        kind = f"prediction: {values.pop('phase')}"
        return {"kind": kind, **values.pop("setting"), **values, "predicted_ratio": self.ratio}


def predict(setting: Setting, names: Sequence[str], batches: Sequence[int] = BATCHES) -> Iterator[Prediction]:
    """Predict prompts and decoding on every device, and measure them on the one that is here.

    Args:
        setting: length, groups, heads, dtype; its device is what `devices.HERE` means.
        names: of devices, see `check_devices`.
        batches: to predict for.

    Raises:
        ValueError: there is no such device, it is not known for this dtype, or the one that is here is no GPU.
    """
    check_devices(names, setting.torch_dtype)
    if HERE in names and not setting.device.startswith("cuda"):
        raise ValueError(f"--on {HERE} predicts for a GPU, and --device is {setting.device}: name A100, H100 or B200.")
    for name in names:
        device, is_here = find_device(name, setting.device, setting.torch_dtype), name == HERE
        for phase in ("prefill", "decode"):
            kinds = DENSE.get(name, {"dense": device.attention}) if phase == "prefill" else {"dense": 1.0}
            for kind, rate in kinds.items():
                found = Prediction(device, phase, f"beside {kind}", setting, 1 / PAIRS)
                for batch in batches:
                    dense, focus = works(setting, phase, batch, rate)
                    found.dense[batch], found.focus[batch] = (1e3 * seconds(x, device) for x in (dense, focus))
                    found.recorded[batch] = on_device(dense, device) / on_device(focus, device)
                    found.launches[batch] = len(focus)
                    if is_here and (measured := _measure(setting, phase, batch)) is not None:
                        found.measured[batch] = measured
                yield found


def works(setting: Setting, phase: str, batch: int, rate: float) -> tuple[list[Work], list[Work]]:
    """The launches of dense attention and of Focus with its routing."""
    if phase == "decode":
        focus = routing_work(setting, batch, 1) + decode_work(setting, batch, PAIRS)
    else:
        focus = routing_work(setting, batch, setting.length) + prompt_work(setting, batch, PAIRS)
    return dense_work(setting, batch, decode=phase == "decode", rate=rate), focus


def seconds(works: Sequence[Work], device: Device) -> float:
    """What a call takes: the host's time and the device's, one beside the other."""
    return max(len(works) * device.launch, on_device(works, device))


def on_device(works: Sequence[Work], device: Device) -> float:
    """What is left in a CUDA graph."""
    return sum(work.seconds(device) for work in works)


def _measure(setting: Setting, phase: str, batch: int) -> Measured | None:
    from .kernels import measure  # Triton is where PyTorch brings CUDA

    return measure(setting, phase, batch, PAIRS)
