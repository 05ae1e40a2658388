"""The demo, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
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

from ..adapter import FocusConfig
from ..adapter.save import save_adapter
from ..card import FocusModelCard
from ..evaluate import QualityRow, quality_figure, quality_table
from ..evaluate.sample import take_sample
from ..explore.command import run_explore
from ..hub import load_adapted, push_to_hub
from ..interpret.command import run_groups
from ..local_hub import LocalHub
from ..machine import measured_with
from ..progress import progress_display, quiet_libraries
from ..records import Evaluation, GroupReport, Results, save_results
from ..records.adapter_files import weights_hash
from ..texts import Texts, cut
from ..train import RichProgress, train_centroids
from .show import show_files, show_quality, show_step, show_visit
from .texts import write_texts
from .tiny_base import train_tiny_base

BASE_STEPS, CENTROID_STEPS = 500, 120
MAX_CONTEXT = 1024
NUM_GROUPS = 4
BATCH = 4
CALIBRATION_WINDOWS = 32
VALIDATION_WINDOWS = 24
EXPLORED = 1024  # tokens on the explorer's page
SEED = 0


@dataclass
class DemoReport:
    """What the demo measured and where its files are."""

    rows: list[QualityRow]
    groups: GroupReport
    visit: dict[str, Any]
    adapter: Path
    explorer: Path
    seconds: float


def run_demo(
    base: str | None,
    text: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    steps: int = CENTROID_STEPS,
    treebank: str | os.PathLike[str] | None = None,
) -> DemoReport:
    """Train centroids, look at their groups, push them to a local Hub, load them back as somebody else, and generate.

    Args:
        base: a causal language model (a folder or a Hub id); by default a tiny one is trained on the spot.
        text: a text file to train on (its last tenth is kept for measuring); by default the documentation that every
            Python ships.
        out: folder for everything the demo writes.
        steps: training steps of the centroids.
        treebank: gold labels (``.conllu``) against which groups are measured; by default they are described on the
            held-out text.

    Raises:
        ValueError: the text is too short.
        RuntimeError: the adapter behaves differently when it is loaded back.
    """
    started, out = time.monotonic(), Path(out)
    console = Console()
    quiet_libraries()
    torch.manual_seed(SEED)
    training, held_out = write_texts(text, out)

    with progress_display(console) as progress:
        model, tokenizer, base_folder = _base_model(base, training, out, progress)
        context = min(MAX_CONTEXT, int(getattr(model.config, "max_position_embeddings", MAX_CONTEXT)))
        windows = cut(training.token_ids(tokenizer), context, context // 4)
        validation = cut(held_out.token_ids(tokenizer), context)[:VALIDATION_WINDOWS]
        config = FocusConfig(
            num_groups=NUM_GROUPS, top_k=1, local_window=max(16, context // 32), task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
        shares = train_centroids(
            model,
            windows,
            out / "trainer",
            steps=steps,
            batch_size=BATCH,
            seed=SEED,
            calibration_windows=CALIBRATION_WINDOWS,
            callbacks=[RichProgress(progress, "centroids")],
            disable_tqdm=True,
            logging_strategy="steps",
            logging_steps=10,
        )
        rows = _evaluate(model, validation, progress)

    results = _results(rows, held_out, training, validation, max(shares.values()), steps)
    show_quality(console, results, NUM_GROUPS)
    adapter = save_adapter(model, out / "adapter")
    quality_figure(rows, adapter / "figures" / "quality.png")
    results.weights_sha256 = weights_hash(adapter)
    save_results(results, adapter)
    take_sample(model, validation[0], results.weights_sha256).save(adapter)

    show_step(console, "Look inside", "what the groups hold, and a page that shows them token by token")
    measured_on = str(out / held_out.name)
    groups = _groups(adapter, base_folder, measured_on, treebank, context, console)
    explorer = _explorer(adapter, base_folder, measured_on, out, console)
    FocusModelCard.from_adapter(adapter, repo_id="demo/focus", base_model="demo/base").save(adapter / "README.md")

    show_step(console, "Share it", "push to a Hub on this machine, then load it from there in a fresh process")
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
    show_visit(console, visit)
    report = DemoReport(rows, groups, visit, adapter, explorer, time.monotonic() - started)
    show_files(console, out, adapter, explorer, report.seconds)
    return report


def _base_model(base: str | None, text: Texts, out: Path, progress: Progress) -> tuple[nn.Module, Any, Path]:
    """The model, its tokenizer, and a folder that holds both, so that it can be pushed."""
    folder = out / "base"
    if base is None:
        return *train_tiny_base(text.documents[0], folder, progress, steps=BASE_STEPS, seed=SEED), folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    if folder.resolve() != Path(base).resolve():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


def _evaluate(model: nn.Module, validation: Tensor, progress: Progress) -> list[QualityRow]:
    top_ks = [1, 2]
    task = progress.add_task("evaluation", total=2 + 2 * len(top_ks))
    rows = []
    for row in quality_table(model, validation, top_ks):
        rows.append(row)
        progress.advance(task)
    return rows


def _results(
    rows: list[QualityRow], held_out: Texts, training: Texts, validation: Tensor, largest_group: float, steps: int
) -> Results:
    """Everything that `focus-hf verify` needs to measure again."""
    count, context = validation.shape
    evaluation = Evaluation(
        held_out.name,
        context,
        [row.to_dict() for row in rows],
        stride=context,
        tokens=count * (context - 1),
        revision=held_out.revision,
        source=held_out.source,
    )
    facts = {
        "command": "focus-hf demo",
        "data": training.name,
        "data revision": training.revision,
        "source": training.source,
        "optimizer steps": steps,
        "windows per step": BATCH,
        "seed": SEED,
        "window": context,
        "stride": context // 4,
        "calibration windows": CALIBRATION_WINDOWS,
    }
    return Results([evaluation], largest_group=largest_group, measured_with=measured_with(), training=facts)


def _groups(
    adapter: Path, base: Path, text: str, treebank: str | os.PathLike[str] | None, context: int, console: Console
) -> GroupReport:
    """As `focus-hf groups --write` does, so that the card shows it."""
    with progress_display(console) as progress:
        return run_groups(
            str(adapter),
            load=partial(load_adapted, base=str(base)),
            progress=progress,
            texts=[] if treebank else [text],
            treebanks=[str(treebank)] if treebank else [],
            window=context,
            seed=SEED,
            write=True,
        )


def _explorer(adapter: Path, base: Path, text: str, out: Path, console: Console) -> Path:
    """As `focus-hf explore` does."""
    page = out / "explorer.html"
    with progress_display(console) as progress:
        run_explore(
            str(adapter),
            [text],
            progress=progress,
            base=str(base),
            max_tokens=EXPLORED,
            out=page,
        )
    return page


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
