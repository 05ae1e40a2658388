"""Predictions for GPUs as a table in Markdown: routing and attention of one layer, beside dense attention.

    python -m studies.predictions --on A100 H100 B200
    python -m studies.predictions --device cuda --lengths 4096 8192   # for the GPU that is here, and measured on it

Numbers with strokes between them are those of each batch size. Predictions are not measurements.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from focus_hf.bench import Setting, grid
from focus_hf.files import write_atomically
from focus_hf.machine import environment, summary

from .devices import DEVICES, HERE
from .predict import BATCHES, Prediction, predict

COLUMNS = (
    *("prediction", "device", "tokens", "groups", "path", "batch"),
    *("predicted ratio", "in a CUDA graph", "limit", "launches", "measured", "in a CUDA graph, beside"),
)


def cells(predicted: Prediction) -> list[str]:
    """One row of the table."""
    setting, launches = predicted.setting, set(predicted.launches.values())
    return [
        predicted.phase,
        predicted.device.name,
        f"{setting.length:,}",
        f"K={setting.num_groups}",
        predicted.path,
        " / ".join(str(batch) for batch in predicted.dense),
        _ratios(predicted.ratio),
        _ratios(predicted.recorded) if predicted.device.overlaps else "",
        f"{predicted.limit:.2f}x",
        " / ".join(map(str, launches if len(launches) == 1 else predicted.launches.values())),
        _ratios({batch: x.dense_launched / x.focus_launched for batch, x in predicted.measured.items()}),
        " / ".join(f"{x.dense / x.focus:.2f}x {x.by}" for x in predicted.measured.values()),
    ]


def _ratios(ratios: dict[int, float]) -> str:
    return " / ".join(f"{ratio:.2f}x" for ratio in ratios.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="+", help=f"{', '.join(DEVICES)}, {HERE}; by default all, or {HERE} on CUDA")
    parser.add_argument("--device", default="cpu", help=f"what {HERE} means")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--num-groups", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write everything, besides")
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "device")}
    names = options.on or ([HERE] if options.device.startswith("cuda") else [*DEVICES])
    found: list[Prediction] = []
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for setting in grid(options.lengths, [options.num_groups], [1], [Setting.local_window], [options.dtype], **shape):
        for predicted in predict(setting, names, options.batches):
            found.append(predicted)
            print("| " + " | ".join(cells(predicted)) + " |", flush=True)
    facts = environment()
    print(f"\n{summary(facts)}")
    if options.json is not None:
        document = {"environment": facts, "results": [predicted.to_dict() for predicted in found]}
        write_atomically(options.json, json.dumps(document, indent=2).encode())


if __name__ == "__main__":
    main()
