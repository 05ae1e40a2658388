"""The demo, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from peft import get_peft_model
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..adapter import FocusConfig
from ..adapter.save import save_adapter
from ..card import FocusModelCard
from ..evaluate import QualityRow, quality_figure, quality_table
from ..evaluate.report import tables
from ..evaluate.sample import take_sample
from ..hub import push_to_hub
from ..local_hub import LocalHub
from ..machine import measured_with
from ..progress import progress_display
from ..records import Evaluation, Results, save_results
from ..records.adapter_files import weights_hash
from ..train import RichProgress, tokenize_windows, train_centroids
from .tiny_base import python_topics, train_tiny_base

BASE_STEPS, CENTROID_STEPS = 500, 120
MAX_CONTEXT = 1024
NUM_GROUPS = 4
VALIDATION_WINDOWS = 24
SEED = 0


@dataclass
class DemoReport:
    """What the demo measured and where its files are."""

    rows: list[QualityRow]
    visit: dict[str, Any]
    adapter: Path
    seconds: float


def run_demo(
    base: str | None,
    text: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    steps: int = CENTROID_STEPS,
) -> DemoReport:
    """Train centroids, push them to a local Hub, load them back as somebody else would, and generate.

    Args:
        base: a causal language model (a folder or a Hub id); by default a tiny one is trained on the spot.
        text: a text file to train on (its last tenth is kept for validation); by default the documentation that every
            Python ships.
        out: folder for everything the demo writes.
        steps: training steps of the centroids.

    Raises:
        ValueError: the text is too short.
        RuntimeError: the adapter behaves differently when it is loaded back.
    """
    started, out = time.monotonic(), Path(out)
    console = Console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)  # PEFT's own
    torch.manual_seed(SEED)
    training_text, validation_text, data = _texts(text)

    with progress_display(console) as progress:
        model, tokenizer, base_folder = _base_model(base, training_text, out, progress)
        context = min(MAX_CONTEXT, int(getattr(model.config, "max_position_embeddings", MAX_CONTEXT)))
        windows = tokenize_windows(tokenizer, training_text, context, stride=context // 4)
        validation = tokenize_windows(tokenizer, validation_text, context)[:VALIDATION_WINDOWS]
        config = FocusConfig(
            num_groups=NUM_GROUPS, top_k=1, local_window=max(16, context // 32), task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
        shares = train_centroids(
            model,
            windows,
            out / "trainer",
            steps=steps,
            seed=SEED,
            callbacks=[RichProgress(progress, "centroids")],
            disable_tqdm=True,
            logging_strategy="steps",
            logging_steps=10,
        )
        rows = _evaluate(model, validation, progress)

    results = _results(rows, data, context, max(shares.values()), steps)
    _show_quality(console, results)
    adapter = save_adapter(model, out / "adapter")
    quality_figure(rows, adapter / "figures" / "quality.png")
    results.weights_sha256 = weights_hash(adapter)
    save_results(results, adapter)
    take_sample(model, validation[0], results.weights_sha256).save(adapter)
    FocusModelCard.from_adapter(adapter, repo_id="demo/focus", base_model="demo/base").save(adapter / "README.md")

    console.print("\n[bold]Share it[/bold]: push to a Hub on this machine, then load it from there in a fresh process")
    with LocalHub(out / "hub") as hub:
        api = HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_repo("demo/base", exist_ok=True)
        api.upload_folder(repo_id="demo/base", folder_path=base_folder)
        push_to_hub(
            adapter,
            "demo/focus",
            base_model="demo/base",
            license="other",
            endpoint=hub.endpoint,
            token=hub.token,
        )
        visit = _visit(model, validation[:1], hub.endpoint, out)

    _show_visit(console, visit)
    report = DemoReport(rows, visit, adapter, time.monotonic() - started)
    _show_files(console, report, out)
    return report


def _texts(text: str | os.PathLike[str] | None) -> tuple[str, str, str]:
    """Training text, validation text, and what to call them."""
    if text is None:
        training, validation = python_topics()
        return training, validation, "Python documentation (held-out topics)"
    whole = Path(text).read_text(encoding="utf-8")
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:], f"{Path(text).name} (last tenth)"


def _base_model(base: str | None, text: str, out: Path, progress: Progress) -> tuple[nn.Module, Any, Path]:
    """The model, its tokenizer, and a folder that holds both, so that it can be pushed."""
    folder = out / "base"
    if base is None:
        return *train_tiny_base(text, folder, progress, steps=BASE_STEPS, seed=SEED), folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    if folder.resolve() != Path(base).resolve():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


def _evaluate(model: nn.Module, validation: Tensor, progress: Progress) -> list[QualityRow]:
    top_ks = [1, 2]
    task = progress.add_task("evaluation", total=2 + len(top_ks))
    rows = []
    for row in quality_table(model, validation, top_ks):
        rows.append(row)
        progress.advance(task)
    return rows


def _results(rows: list[QualityRow], data: str, context: int, largest_group: float, steps: int) -> Results:
    return Results(
        [Evaluation(data, context, [row.to_dict() for row in rows])],
        largest_group=largest_group,
        measured_with=measured_with(),
        training={"optimizer steps": steps, "windows per step": 4, "seed": SEED, "command": "focus-hf demo"},
    )


@torch.no_grad()
def _visit(model: nn.Module, input_ids: Tensor, endpoint: str, out: Path) -> dict[str, Any]:
    """Let a fresh process with an empty cache load the adapter by name and compare its logits with ours."""
    expected, answer = out / "expected.safetensors", out / "visit.json"
    save_file({"input_ids": input_ids.contiguous(), "logits": model(input_ids=input_ids).logits}, expected)
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(out / "visitor-cache")}
    environment["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"  # the visitor is nobody, whoever is logged in elsewhere
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "focus_hf.demo.visitor", "demo/focus", str(expected), str(answer)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"The adapter could not be loaded back:\n{done.stderr[-2000:]}")
    visit = json.loads(answer.read_text(encoding="utf-8"))
    worst = max(visit["logit_differences"].values())
    if not worst <= 1e-4:
        raise RuntimeError(f"The adapter gives other logits when it is loaded back (largest difference {worst:.2g}).")
    return visit


def _show_quality(console: Console, results: Results) -> None:
    console.print()
    for table in tables(results):
        console.print(table)
    ideal, largest = f"ideal {100 / NUM_GROUPS:.1f} %", 100 * (results.largest_group or 0.0)
    console.print(f"Largest group of any layer after calibration: {largest:.1f} % ({ideal})", highlight=False)


def _show_visit(console: Console, visit: dict[str, Any]) -> None:
    for name, difference in visit["logit_differences"].items():
        console.print(f'  {name}("demo/focus"): largest difference of logits {difference:.1e}', highlight=False)
    console.print("\n[bold]Generate[/bold], continuing held-out text:")
    console.print(f"…{visit['prompt_end']}", markup=False, highlight=False, style="dim")
    console.print(visit["continuation"], markup=False, highlight=False)


def _show_files(console: Console, report: DemoReport, out: Path) -> None:
    card, figure = report.adapter / "README.md", report.adapter / "figures" / "quality.png"
    console.print(f"\nDone in {report.seconds:.0f} s.", highlight=False)
    for name, path in (("card", card), ("figure", figure), ("adapter", report.adapter), ("local Hub", out / "hub")):
        console.print(f"  {name:<10} {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Browse that Hub: focus-hf hub --root {out / 'hub'}", markup=False, highlight=False, soft_wrap=True)
