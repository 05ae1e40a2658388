"""The demo, step by step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..card import FocusModelCard
from ..evaluate.report import tables
from ..explore.command import run_explore
from ..files import write_atomically
from ..hub import load_adapted, push_to_hub
from ..interpret.command import run_groups
from ..local_hub import LocalHub
from ..output import say
from ..progress import progress_display, quiet_libraries
from ..texts import Texts, TextSource
from ..train import RichProgress, TrainRecipe, train
from .tiny_base import python_topics, train_tiny_base

BASE_STEPS, CENTROID_STEPS = 500, 120
MAX_CONTEXT = 1024
NUM_GROUPS = 4
CALIBRATION_WINDOWS = 32
VALIDATION_WINDOWS = 24
EXPLORED = 1024  # tokens on the explorer's page
HELD_OUT = 0.1  # share of a text of one's own that is kept for measuring
SEED = 0


def run_demo(
    base: str | None,
    text: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    steps: int = CENTROID_STEPS,
    treebank: str | os.PathLike[str] | None = None,
) -> None:
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
    training, held_out = _write_texts(text, out)
    measured_on = str(out / held_out.name)

    with progress_display(console) as progress:
        base_folder = _base_model(base, training, out / "base", progress)
        positions = getattr(AutoConfig.from_pretrained(base_folder), "max_position_embeddings", MAX_CONTEXT)
        context = min(MAX_CONTEXT, int(positions))
        recipe = TrainRecipe(
            model=str(base_folder),
            output_dir=str(out / "adapter"),
            train_file=[str(out / training.name)],
            eval_file=[measured_on],
            num_groups=NUM_GROUPS,
            local_window=max(16, context // 32),
            seq_len=context,
            stride=context // 4,
            max_steps=steps,
            calibration_windows=CALIBRATION_WINDOWS,
            eval_windows=VALIDATION_WINDOWS,
            logging_steps=10,
            overwrite=True,
            seed=SEED,
        )
        trained = train(recipe, [RichProgress(progress, "centroids")])
    adapter = trained.folder
    console.print()
    for table in tables(trained.results):
        console.print(table)
    largest = 100 * (trained.results.largest_group or 0.0)
    say(console, f"Largest group of any layer after calibration: {largest:.1f} % (ideal {100 / NUM_GROUPS:.1f} %)")

    _announce(console, "Look inside", "what the groups hold, and a page that shows them token by token")
    with progress_display(console) as progress:  # as `focus-hf groups --write` does, so that the card shows it
        run_groups(
            str(adapter),
            load=partial(load_adapted, base=str(base_folder)),
            progress=progress,
            texts=[] if treebank else [measured_on],
            treebanks=[str(treebank)] if treebank else [],
            window=context,
            seed=SEED,
            write=True,
        )
    explorer = out / "explorer.html"
    with progress_display(console) as progress:
        run_explore(
            str(adapter),
            [measured_on],
            load=partial(load_adapted, base=str(base_folder)),
            progress=progress,
            max_tokens=EXPLORED,
            out=explorer,
        )
    FocusModelCard.from_adapter(adapter, repo_id="demo/focus", base_model="demo/base").save(adapter / "README.md")

    _announce(console, "Share it", "push to a Hub on this machine, then load it from there in a fresh process")
    model, tokenizer, _ = load_adapted(str(adapter), base=str(base_folder))
    with LocalHub(out / "hub") as hub:
        place: dict[str, Any] = {"endpoint": hub.endpoint, "token": hub.token}
        api = HfApi(**place)
        api.create_repo("demo/base", exist_ok=True)
        api.upload_folder(repo_id="demo/base", folder_path=base_folder)
        push_to_hub(adapter, "demo/focus", base_model="demo/base", license="other", **place)
        visit = _visit(model, held_out.windows(tokenizer, context)[:1], hub.endpoint, out)
    for name, difference in visit["logit_differences"].items():
        say(console, f'  {name}("demo/focus"): largest difference of logits {difference:.1e}')
    _announce(console, "Generate", "continuing held-out text")
    say(console, f"…{visit['prompt_end']}", style="dim")
    say(console, visit["continuation"])
    _show_files(console, out, adapter, explorer, time.monotonic() - started)


def _write_texts(text: str | os.PathLike[str] | None, out: Path) -> tuple[Texts, Texts]:
    """Training text and held-out text, each from a file of its own in ``out``, so that others can measure again.

    Of Python's documentation, which is the text where none is given, every eighth topic is held out.
    """
    if text is None:
        name, parts = "python-docs", python_topics()
    else:
        (whole,) = TextSource((str(text),)).load().documents
        keep = int(len(whole) * (1 - HELD_OUT))
        name, parts = Path(text).stem, (whole[:keep], whole[keep:])
    files = [out / f"{name}-train.txt", out / f"{name}-held-out.txt"]
    for path, part in zip(files, parts, strict=True):
        write_atomically(path, part.encode())
    training, held_out = (TextSource((str(path),)).load() for path in files)
    return training, held_out


def _base_model(base: str | None, text: Texts, folder: Path, progress: Progress) -> Path:
    """A folder that holds the model and its tokenizer, so that both can be pushed."""
    if base is None:
        train_tiny_base(text.documents[0], folder, progress, steps=BASE_STEPS, seed=SEED)
    elif folder.resolve() != Path(base).resolve():
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


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


def _announce(console: Console, title: str, text: str) -> None:
    console.print(f"\n[bold]{title}[/bold]: {text}", highlight=False, soft_wrap=True)


def _show_files(console: Console, out: Path, adapter: Path, explorer: Path, seconds: float) -> None:
    """What there is to look at, the most telling first."""
    command = "focus-hf" if shutil.which("focus-hf") else str(Path(sys.executable).with_name("focus-hf"))
    things = {
        "card": (adapter / "README.md", "what the adapter is, what it costs and keeps, what its groups mean"),
        "explorer": (explorer, "in a browser: every token's groups, and what it attends to far away"),
        "picture": (adapter / "figures" / "quality.png", "perplexity against pairs attended"),
        "local Hub": (f"{command} hub --root {out / 'hub'}", "then http://127.0.0.1:8888/demo/focus in a browser"),
    }
    say(console, f"\nDone in {seconds:.0f} s. Look at these, in this order:")
    for number, (name, (where, what)) in enumerate(things.items(), 1):
        say(console, f"  {number}. {name:<10} {where}")
        say(console, f"     {'':<10} {what}", style="dim")
