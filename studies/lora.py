"""Focus and LoRA on one domain: what each gains there, and what it costs elsewhere.

    python -m studies.lora --model org/base --train-file law.txt --eval-file law-test.txt \
        --retention-file general.txt --output-dir comparison --lora-rank 2 --lora-rank 16 --lora-learning-rate 2e-4

Takes the flags of `focus-hf train`; without a rank LoRA has as many parameters as Focus.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoTokenizer, PrinterCallback, Trainer, set_seed

from focus_hf.card import write_card
from focus_hf.cli.app import progress_bars
from focus_hf.cli.flags import Config, JsonFile, flags_of
from focus_hf.evaluate import Mode, attending, perplexity
from focus_hf.hub import load_adapted
from focus_hf.output import deliver
from focus_hf.texts import TextSource
from focus_hf.train import RichProgress, TrainRecipe, WindowDataset, train
from focus_hf.train.trainer import training_arguments


@dataclass(frozen=True)
class ComparisonRow:
    """One way of attending or adapting.

    Args:
        name: of it.
        parameters: trained.
        domain: perplexity on held-out text of the domain.
        retention: perplexity on text of another domain.
        pairs: share of pairs attended in routed layers.
        seconds: of training.
    """

    name: str
    parameters: int
    domain: float
    retention: float
    pairs: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_with_lora(
    recipe: TrainRecipe,
    retention_file: Path,
    lora_ranks: Sequence[int],
    lora_learning_rates: Sequence[float],
    progress: Progress,
) -> list[ComparisonRow]:
    """Train Focus, then LoRA of several ranks, on the same windows and steps.

    Args:
        recipe: of Focus; LoRA takes its windows, steps, batch size and seed. Its ``eval_file`` is the domain's
            held-out text.
        retention_file: text of another domain.
        lora_ranks: of LoRA; none for the one whose parameters are closest in number to Focus'.
        lora_learning_rates: of LoRA, which wants a smaller one than centroids do; each rank is trained at each.
        progress: shows how far it is.

    Returns:
        Rows for the base model, Focus (dense ``soft`` routing, then hard at each ``top_k`` with a window of as many
        pairs) and every LoRA.

    Raises:
        ValueError: bad input, see `train`.
    """
    if not recipe.eval_file:
        raise ValueError("A comparison needs eval_file: held-out text of the domain.")
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model)
    windows = _windows(recipe.training_source(), tokenizer, recipe, recipe.stride)
    domain = _windows(TextSource(tuple(recipe.eval_file)), tokenizer, recipe, None)[: recipe.eval_windows]
    other = _windows(TextSource((str(retention_file),)), tokenizer, recipe, None)
    other = other[:: max(1, len(other) // recipe.eval_windows)][: recipe.eval_windows]

    result = train(
        replace(recipe, output_dir=str(Path(recipe.output_dir) / "focus")),
        [RichProgress(progress, "Focus")],
        on_saved=partial(write_card, base_model=recipe.base_model),
    )
    seconds = result.results.training["seconds"]  # without reading, balancing and measuring
    model, _, _ = load_adapted(str(result.folder), base=recipe.model, device_map=recipe.device_map, dtype=recipe.dtype)

    centroids = sum(p.numel() for name, p in model.named_parameters() if "focus_" in name and "balance" not in name)
    rows = [_row("base model, dense", 0, model, Mode("dense"), domain, other, 1.0, 0.0)]
    for found in result.results.evaluations[0].rows:
        mode, share = Mode(found["mode"], found["top_k"], found.get("width")), found["pairs"]
        if mode.name in ("soft", "hard"):
            rows.append(_row(f"Focus, {_label(mode)}", centroids, model, mode, domain, other, share, seconds))
        elif mode.name == "window":  # what as many pairs buy without training
            rows.append(_row(str(mode), 0, model, mode, domain, other, share, 0.0))

    base = copy.deepcopy(model)
    base.delete_adapter("default")
    tried = [(rank, rate) for rank in lora_ranks or [_closest_rank(base, centroids)] for rate in lora_learning_rates]
    for rank, rate in tried:
        out = Path(recipe.output_dir) / ("lora" if len(tried) == 1 else f"lora-{rank}-{rate:g}")
        lora = _lora(copy.deepcopy(base), rank)
        set_seed(recipe.seed)
        started = time.monotonic()
        _train_lora(lora, replace(recipe, output_dir=str(out), learning_rate=rate), windows, progress)
        seconds = round(time.monotonic() - started)
        lora.save_pretrained(out)
        parameters = sum(p.numel() for p in lora.parameters() if p.requires_grad)
        name = f"LoRA, rank {rank}, rate {rate:g}"
        rows.append(ComparisonRow(name, parameters, perplexity(lora, domain), perplexity(lora, other), 1.0, seconds))
    return rows


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """For the screen."""
    table = Table(title="Focus and LoRA", title_justify="left")
    for place, column in enumerate(("", "parameters", "domain", "other domain", "pairs", "training")):
        table.add_column(column, justify="left" if place == 0 else "right")
    base = rows[0]
    for row in rows:
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            f"{row.domain:.2f} ({100 * (row.domain / base.domain - 1):+.2f} %)",
            f"{row.retention:.2f} ({100 * (row.retention / base.retention - 1):+.2f} %)",
            f"{100 * row.pairs:.0f} %",
            f"{row.seconds:.0f} s",
        )
    return table


def _windows(source: TextSource, tokenizer: Any, recipe: TrainRecipe, stride: int | None) -> Tensor:
    return source.load().windows(tokenizer, recipe.seq_len, stride)


def _row(
    name: str,
    parameters: int,
    model: nn.Module,
    mode: Mode,
    domain: Tensor,
    other: Tensor,
    pairs: float,
    seconds: float,
) -> ComparisonRow:
    with attending(model, mode):
        return ComparisonRow(
            name, parameters, perplexity(model, domain), perplexity(model, other), pairs, round(seconds)
        )


def _label(mode: Mode) -> str:
    return "soft" if mode.name == "soft" else f"top_k={mode.top_k}"


def _closest_rank(base: Any, budget: int) -> int:
    """The rank of LoRA whose parameters come closest in number."""
    with torch.device("meta"):
        one = _lora(copy.deepcopy(base).to("meta"), 1)
    return max(1, round(budget / sum(p.numel() for p in one.parameters() if p.requires_grad)))


def _lora(base: Any, rank: int) -> Any:
    """LoRA on the query and value projections."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    targets = None if base.config.model_type in TARGETS else "all-linear"
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM"))


def _train_lora(model: nn.Module, recipe: TrainRecipe, windows: Tensor, progress: Progress) -> None:
    arguments = training_arguments(replace(recipe, eval_steps=0, early_stopping=0))
    arguments.disable_tqdm = True
    trainer = Trainer(
        model=model, args=arguments, train_dataset=WindowDataset(windows), callbacks=[RichProgress(progress, "LoRA")]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.eval()


@flags_of(TrainRecipe)
def main(
    given: dict[str, Any],
    retention_file: Annotated[Path, typer.Option(help="Text of another domain.")],
    lora_rank: Annotated[
        list[int] | None, typer.Option(help="Of LoRA, may be repeated; by default as many parameters as Focus'.")
    ] = None,
    lora_learning_rate: Annotated[
        list[float] | None,
        typer.Option(help="Of LoRA, 0.002 by default, may be repeated; Focus takes --learning-rate."),
    ] = None,
    json: JsonFile = None,
    config: Config = None,
) -> None:
    """Train Focus and LoRA on the same windows and measure both."""
    recipe = TrainRecipe.from_values(config, given)
    with progress_bars() as progress:
        rows = compare_with_lora(recipe, retention_file, lora_rank or (), lora_learning_rate or (2e-3,), progress)
    deliver(as_json(rows), json, [comparison_table(rows)])


def as_json(rows: Sequence[ComparisonRow]) -> str:
    return json.dumps({"rows": [row.to_dict() for row in rows]}, indent=2) + "\n"


if __name__ == "__main__":
    typer.run(main)
