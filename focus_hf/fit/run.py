"""A whole fit: model and text in, an adapter with routing and budgets per head out."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from transformers import AutoTokenizer, set_seed

from ..adapter.config import FocusConfig
from ..adapter.discovery import numbered
from ..adapter.placement import check_placement, load_base
from ..adapter.save import save_adapter
from ..adapter.targets import find_targets
from ..commits import commit_of
from ..evaluate.sample import take_sample
from ..machine import measured_with
from ..records import Results, load_results
from ..records.adapter_files import WEIGHTS_FILE
from ..records.typed import is_number
from ..texts import Texts, hash_of
from ..train.data import check_length, check_tokenizer, check_vocabulary
from ..train.outcome import replace_sample, write_records
from .assemble import Budget, Table, add_adapter, choose_budget, cost_table, round_to_half
from .capture import capture
from .layer import LayerFit, fit_layer, load_layer, save_layer
from .recipe import FitRecipe
from .store import bytes_per_window, read
from .windows import Windows, choose_windows

#: Folder of fitted layers, inside the adapter's.
LAYERS = "fit"

#: Fields of a recipe that decide what layers are fitted to; others may change when they are used again.
_DECIDE = (
    *("seq_len", "windows", "cost_windows", "rows", "steps", "seed", "groups"),
    *("num_groups", "group_dim", "local_window", "sink_tokens"),
)


@dataclass
class FitResult:
    """What a fit leaves.

    Args:
        folder: of the adapter.
        results: how it was fitted; quality is measured by ``focus-hf eval``.
        budgets: what was chosen; the first one is in force.
        tables: for every length the cost of each option of each head, by ``"LAYER.HEAD"``.
    """

    folder: Path
    results: Results
    budgets: list[Budget]
    tables: dict[int, Table]


def fit(
    recipe: FitRecipe,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_saved: Callable[[Path], object] = lambda folder: None,
) -> FitResult:
    """Fit routing to a model's own attention, choose where pairs are spent, and save.

    Layers are fitted one by one and kept; ``resume`` uses those that are there.

    Args:
        recipe: what to do.
        progress: shows how far it is.
        say: told what happens next.
        on_saved: called with the adapter's folder; `focus_hf.card.write_card` makes its card.

    Raises:
        ValueError: bad input; says which and what to do.
        OSError: the captured tensors or the adapter cannot be written.
    """
    out, started = Path(recipe.output_dir), time.monotonic()
    _refuse_to_overwrite(out, recipe)
    check_placement(device_map=recipe.device_map, dtype=recipe.dtype)
    set_seed(recipe.seed)
    say("reading text")
    texts = [source.load(seed=recipe.seed) for source in recipe.sources()]
    commit, tokenizer_commit = commit_of(recipe.model), commit_of(recipe.tokenizer or recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model, revision=tokenizer_commit)
    model = load_base(recipe.model, device_map=recipe.device_map, dtype=recipe.dtype, revision=commit)
    check_length(max(recipe.seq_len, *recipe.at), model.config)
    windows = choose_windows(texts, tokenizer, recipe)
    embeddings: Any = model.get_input_embeddings()
    for number, ids in windows.ids.items():
        check_vocabulary(ids, embeddings.weight.shape[0], texts[number % len(texts)].name)
    probe = windows.ids[windows.fit_on[0]]
    check_tokenizer(model, probe[None])

    config = recipe.focus_config(revision=commit, tokenizer_revision=tokenizer_commit)
    targets = _numbered_targets(model, config)
    made_from = _made_from(recipe, texts, commit)
    fitted = _layers_at_hand(targets, recipe, made_from) if recipe.resume else {}
    if recipe.resume:
        say(f"{len(fitted)} of {len(targets)} layers are fitted already")
    missing = {layer: module for layer, module in targets.items() if layer not in fitted}
    shown = Progress(disable=True) if progress is None else progress
    fitted |= dict(_fit_layers(model, missing, windows, recipe, made_from, shown))
    if partly := {layer: fit for layer, fit in fitted.items() if not set(recipe.recall_lengths) <= set(fit.recall)}:
        others = {layer: targets[layer] for layer in partly}
        fitted |= dict(_fit_layers(model, others, windows.for_recall(), recipe, made_from, shown, partly))
    tables = {length: cost_table(fitted, length) for length in recipe.lengths}
    budgets = [
        choose_budget(
            *(cost_table(fitted, length, recall), share, length, recipe.uniform),
            headroom=recipe.headroom,
            ordinary=tables[length],
        )
        for share, length, recall in zip(recipe.pairs, recipe.at, recipe.recall, strict=True)
    ]
    config.head_patterns = budgets[0].patterns
    if len(budgets) > 1:
        config.budgets = {f"{budget.wanted:g}": budget.patterns for budget in budgets}
    routed = add_adapter(model, config, {layer: fit.routers for layer, fit in fitted.items()})
    if recipe.half:
        round_to_half(routed)  # what is measured here is what others load
    seconds = time.monotonic() - started + (_seconds_before(out) if len(missing) < len(targets) else 0.0)
    results = Results(measured_with=measured_with(), training=_facts(recipe, texts, seconds))
    folder = save_adapter(routed, out, dtype=torch.float16 if recipe.half else None)
    replace_sample(take_sample(routed, probe), folder)
    write_records(results, folder)
    on_saved(folder)
    return FitResult(folder, results, budgets, tables)


def _numbered_targets(model: Any, config: FocusConfig) -> dict[int, Any]:
    """The attention modules to fit, by number.

    Raises:
        ValueError: the model runs a module several times in a pass, each time on other tokens.
    """
    targets = find_targets(model, config)
    if again := [name for name, module in targets.items() if not numbered(module)]:
        raise ValueError(
            f"{type(model).__name__} keeps the keys of {again[0]} in a slot of the cache that changes from call to "
            "call, so fit cannot tell its layers apart. Use focus-hf train."
        )
    return {int(module.layer_idx): module for module in targets.values()}


def _refuse_to_overwrite(out: Path, recipe: FitRecipe) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"output_dir {out} is a file; name a folder.")
    if recipe.resume:
        return
    if (out / WEIGHTS_FILE).exists() and not recipe.overwrite:
        raise ValueError(f"{out} already holds an adapter: choose another output_dir, or pass --overwrite.")
    if any((out / LAYERS).glob("*.safetensors")):
        if not recipe.overwrite:
            raise ValueError(f"{out} holds fitted layers: pass --resume to use them, or --overwrite.")
        shutil.rmtree(out / LAYERS)


def _made_from(recipe: FitRecipe, texts: Sequence[Texts], commit: str | None) -> str:
    """What stands for everything that fitted layers depend on."""
    facts = {name: getattr(recipe, name) for name in _DECIDE}
    facts |= {"model": recipe.model, "commit": commit, "lengths": recipe.lengths}
    if recipe.dtype != "auto":
        facts["dtype"] = recipe.dtype
    facts["texts"] = [[text.name, text.revision] for text in texts]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _layers_at_hand(layers: Iterable[int], recipe: FitRecipe, made_from: str) -> dict[int, LayerFit]:
    kept = {layer: load_layer(_layer_file(recipe, layer), made_from) for layer in layers}
    return {layer: found for layer, found in kept.items() if found is not None}


def _seconds_before(folder: Path) -> float:
    """What it took to fit the layers that are used again, as far as it is known."""
    results = load_results(folder)
    seconds: Any = None if results is None else results.training.get("seconds")
    return float(seconds) if is_number(seconds) else 0.0


def _layer_file(recipe: FitRecipe, layer: int) -> Path:
    return Path(recipe.output_dir) / LAYERS / f"{layer}.safetensors"


def _fit_layers(
    model: Any,
    targets: dict[int, nn.Module],
    windows: Windows,
    recipe: FitRecipe,
    made_from: str,
    progress: Progress,
    fitted: Mapping[int, LayerFit] | None = None,
) -> Iterator[tuple[int, LayerFit]]:
    """Fit layers and keep each; as many are captured at once as there is room for.

    Args:
        model: the base model.
        targets: attention modules to fit, by number.
        windows: to look at.
        recipe: how.
        made_from: see `_made_from`.
        progress: shows how far it is.
        fitted: the layers, if all that is missing is what options do to recall.
    """
    passes = list(_passes(sorted(targets), model.config, windows, recipe))
    seen = progress.add_task("running windows of text", total=len(passes) * len(windows.ids))
    done = progress.add_task("fitting layers", total=len(targets))
    for layers in passes:
        with tempfile.TemporaryDirectory(prefix="focus-fit-", dir=recipe.scratch_dir) as scratch:
            folder = Path(scratch)
            capture(
                model,
                {layer: targets[layer] for layer in layers},
                windows.ids,
                folder,
                rows=recipe.rows,
                seed=recipe.seed,
                copied=windows.copied,
                checkpointing=recipe.gradient_checkpointing,
                tick=partial(progress.advance, seen),
            )
            for layer in layers:
                reader = partial(read, folder, layer=layer)
                numbers = windows.fit_on, windows.measure_on
                known = None if fitted is None else fitted[layer]
                found = fit_layer(reader, *numbers, recipe, recipe.seed + layer, windows.recall_on, known)
                save_layer(found, _layer_file(recipe, layer), made_from)
                progress.update(done, advance=1, description=f"fitting layers (layer {layer})")
                yield layer, found


def _passes(layers: Sequence[int], model_config: Any, windows: Windows, recipe: FitRecipe) -> Iterator[list[int]]:
    """Layers whose captured tensors find room together; the later ones first, since the backward pass meets them
    first."""
    each = sum(bytes_per_window(model_config, len(ids), recipe.rows) for ids in windows.ids.values())
    count = max(1, int(recipe.scratch_gb * 1e9 / each))
    for end in range(len(layers), 0, -count):
        yield list(layers[max(0, end - count) : end])


def _facts(recipe: FitRecipe, texts: Sequence[Texts], seconds: float) -> dict[str, Any]:
    """What a card says about how the adapter was made."""
    files = {"data": ", ".join(text.name for text in texts), "data revision": texts[0].revision}
    if recipe.train_file:
        files["data revision"] = hash_of(recipe.train_file)
    budgets = [f"{share:.0%} at {length:,} tokens" for share, length in zip(recipe.pairs, recipe.at, strict=True)]
    return {
        **files,
        "method": "fitted to the base model's attention, head by head" if recipe.groups else "budgets without groups",
        "windows": f"{recipe.windows} of {recipe.seq_len} tokens",
        "windows for costs": f"{recipe.cost_windows} for each length",
        "pairs": ", ".join(budgets),
        "recall": ", ".join(f"{share:.2%}" for share in recipe.recall) if any(recipe.recall) else "not considered",
        "headroom": f"{recipe.headroom:.0%}",
        "heads": "alike" if recipe.uniform else "each by its costs",
        "seed": recipe.seed,
        "seconds": round(seconds),
        "recipe": {k: v for k, v in asdict(recipe).items() if k in _DECIDE},
    }
