"""Which way of training centroids keeps the most quality? One short training per variant, everything else equal.

    python studies/recipes.py --model BASE --train-file train.txt --eval-file held-out.txt --out study --steps 200

Each variant leaves its adapter and its log in ``study/NAME``; a variant that is there already is not run again. The
table of all variants is printed as Markdown at the end, and with ``--dominance`` how the largest group developed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from focus_hf import routing
from focus_hf.train import TrainRecipe, train

#: What each variant changes.
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "reference-seed-1": {"seed": 1},
    "distill": {"distill": 1.0},
    "sharpness-1": {"sharpness": 1.0},
    "sharpness-4": {"sharpness": 4.0},
    "additive": {"gate": "additive"},
    "additive-seed-1": {"gate": "additive", "seed": 1},
    "additive-not-annealed": {"gate": "additive", "gate_start": 8.0},
    "additive-straight-through": {"gate": "additive", "straight_through": True},
    "multiplicative": {"gate": "multiplicative"},
    "sinks-0": {"sink_tokens": 0},
    "window-16": {"local_window": 16},
    "window-128": {"local_window": 128},
    "window-256": {"local_window": 256},
    "groups-4": {"num_groups": 4},
    "groups-16": {"num_groups": 16},
    "sinkhorn-over-batch": {},
    "sinkhorn-values": {},
    "no-sinkhorn-gradient": {},
    "softmax-and-balance-loss": {},
    "softmax": {},
}


def over_batch(scores: Tensor, balance: Tensor, iterations: int, valid: Any = None) -> tuple[Tensor, Tensor]:
    """The gradient of Sinkhorn over all tokens of a batch together."""
    _, potentials = routing.sinkhorn(scores.flatten(0, 1), iterations)
    found = potentials.detach()
    value = torch.where(balance.any(), balance, found)
    return torch.softmax(scores + value + potentials - found, dim=-1), found.expand(scores.shape[0], 1, -1)


def own_potentials(scores: Tensor, balance: Tensor, iterations: int, valid: Any = None) -> tuple[Tensor, Tensor]:
    """Sinkhorn's value too: every sequence has potentials of its own, as in the paper."""
    assignments, potentials = routing.sinkhorn(scores, iterations)
    return assignments, potentials.detach()[:, None]


def no_gradient(scores: Tensor, balance: Tensor, iterations: int, valid: Any = None) -> tuple[Tensor, Tensor]:
    """Inference's value, and a gradient that knows nothing of balance."""
    potentials = routing.sinkhorn(scores.detach(), iterations)[1][:, None]
    return torch.softmax(scores + torch.where(balance.any(), balance, potentials), dim=-1), potentials


def plain_softmax(scores: Tensor, balance: Tensor, iterations: int, valid: Any = None) -> tuple[Tensor, Tensor]:
    """Nothing balances the groups."""
    return torch.softmax(scores, dim=-1), scores.new_zeros(scores.shape[0], 1, scores.shape[-1])


def balance_loss(scores: Tensor, balance: Tensor, iterations: int, valid: Any = None) -> tuple[Tensor, Tensor]:
    """Softmax, with the gradient of the auxiliary loss of mixtures of experts: ``K * sum(share * probability)``."""
    assignments, potentials = plain_softmax(scores, balance, iterations)
    return _WithBalanceLoss.apply(assignments), potentials


class _WithBalanceLoss(torch.autograd.Function):
    WEIGHT = 0.01

    @staticmethod
    def forward(ctx: Any, assignments: Tensor) -> Tensor:
        shares = torch.nn.functional.one_hot(assignments.argmax(-1), assignments.shape[-1]).float().mean(dim=(0, 1))
        ctx.gradient = _WithBalanceLoss.WEIGHT * assignments.shape[-1] * shares / assignments[..., 0].numel()
        return assignments.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + ctx.gradient


def no_step(scores: Tensor, balance: Tensor, top_k: int, valid: Any = None, rate: float = 0.0) -> Tensor:
    """The balance potentials stay where they are."""
    return torch.zeros_like(balance)


#: What replaces functions of `focus_hf.routing` in these variants.
BALANCING: dict[str, dict[str, Any]] = {
    "sinkhorn-over-batch": {"balanced_assignments": over_batch},
    "sinkhorn-values": {"balanced_assignments": own_potentials},
    "no-sinkhorn-gradient": {"balanced_assignments": no_gradient},
    "softmax-and-balance-loss": {"balanced_assignments": balance_loss, "balance_step": no_step},
    "softmax": {"balanced_assignments": plain_softmax, "balance_step": no_step},
}


@contextmanager
def balanced_as(name: str) -> Iterator[None]:
    """Within the block, training balances groups as this variant does."""
    with mock.patch.multiple(routing, **BALANCING[name]) if name in BALANCING else nullcontext():
        yield


def run(name: str, common: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train a variant, or read what an earlier run of it left."""
    answer = out / name / "study.json"
    if not answer.is_file():
        shutil.rmtree(out / name, ignore_errors=True)
        recipe = TrainRecipe(**{**common, **VARIANTS[name], "output_dir": str(out / name)})
        with balanced_as(name):
            result = train(recipe)
        (evaluation,) = result.results.evaluations
        answer.write_text(
            json.dumps(
                {
                    "name": name,
                    "rows": [{k: v for k, v in row.items() if k != "positions"} for row in evaluation.rows],
                    "largest_group": result.results.largest_group,
                    "seconds": result.results.training["seconds"],
                    "dominance": [(e["step"], e["largest_group"]) for e in result.log if "largest_group" in e],
                    "measured_with": result.results.measured_with,
                }
            )
        )
    return json.loads(answer.read_text())


def table(results: list[dict[str, Any]]) -> str:
    """All variants as Markdown: perplexity, and in brackets the share of pairs."""
    lines = [
        "| variant | dense | local only | soft | hard, k=1 | hard, k=2 | gap recovered at k=1 | largest group |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        rows = {(row["mode"], row["top_k"]): row for row in result["rows"]}
        dense, local, one = (rows[key]["perplexity"] for key in (("dense", None), ("local", None), ("hard", 1)))
        soft = rows.get(("soft", None))
        cells = [
            result["name"],
            f"{dense:.2f}",
            cell(rows["local", None]),
            "" if soft is None else f"{soft['perplexity']:.2f}",
            cell(rows["hard", 1]),
            cell(rows["hard", 2]),
            f"{100 * (local - one) / (local - dense):.0f} %",
            f"{100 * result['largest_group']:.1f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    return f"{row['perplexity']:.2f} ({100 * row['pairs']:.0f} %)"


def dominance(results: list[dict[str, Any]]) -> str:
    """Largest group of any layer, by step, as Markdown."""
    steps = [step for step, _ in results[0]["dominance"]]
    lines = ["| variant | " + " | ".join(f"step {step}" for step in steps) + " |", "|---|" + "---:|" * len(steps)]
    for result in results:
        lines.append(f"| {result['name']} | " + " | ".join(f"{100 * s:.0f} %" for _, s in result["dominance"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--eval-file", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--local-window", type=int, default=64)
    parser.add_argument("--eval-windows", type=int, default=24)
    parser.add_argument("--calibration-windows", type=int, default=32)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names with commas")
    parser.add_argument("--dominance", action="store_true")
    arguments = parser.parse_args()
    common = {
        "model": arguments.model,
        "train_file": [arguments.train_file],
        "eval_file": [arguments.eval_file],
        "local_window": arguments.local_window,
        "seq_len": arguments.seq_len,
        "stride": max(1, arguments.seq_len // 2),
        "max_steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "eval_windows": arguments.eval_windows,
        "calibration_windows": arguments.calibration_windows,
        "logging_steps": max(1, arguments.steps // 5),
        "trainer": {"disable_tqdm": True},
    }
    results = [run(name, common, arguments.out) for name in arguments.variants.split(",")]
    print(table(results))
    if arguments.dominance:
        print("\n" + dominance(results))


if __name__ == "__main__":
    main()
