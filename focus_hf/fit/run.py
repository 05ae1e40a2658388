"""A whole fit: model and text in, an adapter with routing by cells out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from rich.progress import Progress
from torch import Tensor, nn
from transformers import AutoTokenizer, set_seed

from ..adapter import focus_layers
from ..adapter.config import FocusConfig
from ..adapter.discovery import numbered
from ..adapter.save import save_adapter
from ..adapter.targets import find_targets
from ..commits import commit_of
from ..evaluate.checks import check_length, check_tokenizer, check_vocabulary
from ..evaluate.leave import replace_sample, take_sample, write_records
from ..machine import measured_with
from ..placement import check_placement, load_base
from ..records import Results
from ..routing.cells import CellRouter
from ..texts import Texts, hash_of
from .capture import capture, read
from .curves import HeadCurves, joined
from .dial import DialPoint, dial, nearest, offsets, pairs_curves
from .estimate import Shapes, needs
from .kept import DECIDE, LAYERS, check_scratch, fingerprint, prepare_folder, seconds_before
from .layer import LayerFit, fit_layer, load_layer, save_layer
from .recipe import FitRecipe
from .windows import windows_of

#: Shares of pairs at which the dial is told.
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)


@dataclass
class FitResult:
    """What a fit leaves.

    Args:
        folder: of the adapter.
        results: how it was fitted; quality is measured by ``focus-hf eval``.
        dial: by length of context, what shares of pairs cost by the fit's own estimate.
        layers: how many of the model's layers are routed, and how many it has.
    """

    folder: Path
    results: Results
    dial: dict[int, list[DialPoint]]
    layers: tuple[int, int]


def fit(
    recipe: FitRecipe,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_saved: Callable[[Path], object] = lambda folder: None,
) -> FitResult:
    """Fit routing to a model's own attention, and save.

    Layers are fitted one by one and kept; ``resume`` uses those that are there.

    Args:
        recipe: what to do.
        progress: shows how far it is.
        say: told what happens next, and what it takes.
        on_saved: called with the adapter's folder; `focus_hf.card.write_card` makes its card.

    Raises:
        ValueError: bad input; says which and what to do.
        OSError: the captured tensors or the adapter cannot be written.
    """
    out, started = prepare_folder(recipe), time.monotonic()
    check_placement(device_map=recipe.device_map, dtype=recipe.dtype)
    set_seed(recipe.seed)
    say("reading text")
    texts = [source.load(seed=recipe.seed) for source in recipe.sources()]
    commit, tokenizer_commit = commit_of(recipe.model), commit_of(recipe.tokenizer or recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model, revision=tokenizer_commit)
    model = load_base(recipe.model, device_map=recipe.device_map, dtype=recipe.dtype, revision=commit)
    recipe = recipe.for_model(getattr(model.config.get_text_config(), "max_position_embeddings", None))
    check_length(max(recipe.lengths), model.config)
    windows = []
    embeddings: Any = model.get_input_embeddings()
    for text, ids in windows_of(recipe, texts, tokenizer):
        check_vocabulary(ids, embeddings.weight.shape[0], text.name)
        windows.append(ids)
    rate = _rate(model, windows[0])

    config = recipe.focus_config(revision=commit, tokenizer_revision=tokenizer_commit, pairs=recipe.pairs)
    targets = _numbered_targets(model, config)
    made_from = fingerprint(recipe, texts, commit)
    fitted: dict[int, LayerFit] = {}
    if recipe.resume:
        fitted = {n: found for n in targets if (found := load_layer(_file(out, n), made_from)) is not None}
        say(f"{len(fitted)} of {len(targets)} layers are fitted already")
    missing = {layer: module for layer, module in targets.items() if layer not in fitted}
    if missing:
        shapes = Shapes.of(model.config.get_text_config(), len(missing), sum(p.numel() for p in model.parameters()))
        expected = needs(shapes, recipe, next(model.parameters()).element_size())
        check_scratch(expected.scratch, recipe)
        say(expected.in_words(rate))
        shown = Progress(disable=True) if progress is None else progress
        fitted |= dict(_fit_layers(model, missing, windows, recipe, made_from, expected.at_once, shown))

    router_of, curves = compare_heads(fitted)
    config.pairs_curves = pairs_curves(curves)
    longest = max(recipe.lengths).bit_length() - 1
    told = {1 << power: dial(curves, 1 << power, SHARES) for power in range(min(10, longest), longest + 1)}
    if point := nearest(told[1 << longest], recipe.pairs):
        config.threshold = round(point.threshold, 3)
    routed = get_peft_model(model, config)
    for layer in focus_layers(routed):
        tensors = router_of[layer.layer_idx].tensors().values()  # in the order in which the configuration names them
        for name, tensor in zip(config.tensor_shapes(), tensors, strict=True):
            getattr(layer, name)["default"].data.copy_(tensor)
    folder = save_adapter(routed, out, dtype=torch.float16)
    seconds = time.monotonic() - started + (seconds_before(out) if len(missing) < len(targets) else 0.0)
    results = Results(measured_with=measured_with(), training=_facts(recipe, texts, seconds))
    replace_sample(take_sample(routed, windows[0]), folder)
    write_records(results, folder)
    on_saved(folder)
    all_layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", len(targets)))
    return FitResult(folder, results, told, (len(targets), all_layers))


def _file(out: Path, layer: int) -> Path:
    return out / LAYERS / f"{layer}.safetensors"


def _rate(model: Any, ids: Tensor) -> float:
    """Operations a second, from a forward pass that checks the tokenizer, too."""
    for _ in range(2):  # in the first, weights are still read from disk
        started = time.monotonic()
        check_tokenizer(model, ids[None])
        seconds = time.monotonic() - started
    return 2.0 * sum(p.numel() for p in model.parameters()) * min(len(ids), 256) / max(seconds, 1e-3)


def compare_heads(fitted: Mapping[int, LayerFit]) -> tuple[dict[int, CellRouter], HeadCurves]:
    """Routers with offsets, and the curves of all heads as functions of the one threshold."""
    layers = sorted(fitted)
    curves = joined(fitted[layer].curves for layer in layers)
    found = offsets(curves)
    parts = found.split([len(fitted[layer].router.offset) for layer in layers])
    routers = {layer: replace(fitted[layer].router, offset=part) for layer, part in zip(layers, parts, strict=True)}
    return routers, curves.shifted(found)


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


def _fit_layers(
    model: Any,
    targets: Mapping[int, nn.Module],
    windows: Sequence[Tensor],
    recipe: FitRecipe,
    made_from: str,
    at_once: int,
    progress: Progress,
) -> Iterator[tuple[int, LayerFit]]:
    """Fit layers by number and keep each; so many are captured together."""
    numbers = sorted(targets)
    # The later ones first, since the backward pass meets them first.
    passes = [numbers[max(0, end - at_once) : end] for end in range(len(numbers), 0, -at_once)]
    seen = progress.add_task("running windows of text", total=len(passes) * len(windows))
    done = progress.add_task("fitting layers", total=len(targets))
    fit_on, measure_on = range(sum(recipe.windows)), range(sum(recipe.windows), len(windows))
    for layers in passes:
        with tempfile.TemporaryDirectory(prefix="focus-fit-", dir=recipe.scratch_dir) as scratch:
            folder = Path(scratch)
            capture(
                model,
                {layer: targets[layer] for layer in layers},
                dict(enumerate(windows)),
                folder,
                rows=recipe.rows,
                seed=recipe.seed,
                checkpointing=recipe.gradient_checkpointing,
                tick=partial(progress.advance, seen),
            )
            for layer in layers:
                found = fit_layer(partial(read, folder, layer=layer), fit_on, measure_on, recipe, recipe.seed + layer)
                save_layer(found, _file(Path(recipe.output_dir), layer), made_from)
                progress.update(done, advance=1, description=f"fitting layers (layer {layer})")
                yield layer, found


def _facts(recipe: FitRecipe, texts: Sequence[Texts], seconds: float) -> dict[str, Any]:
    """What a card says about how the adapter was made."""

    def told(counts: Sequence[int]) -> str:
        pairs = zip(counts, recipe.seq_len, strict=True)
        return " and ".join(f"{count} of {length:,} tokens" for count, length in pairs)

    return {
        "data": ", ".join(text.name for text in texts),
        "data revision": hash_of(recipe.train_file) if recipe.train_file else texts[0].revision,
        "method": "fitted to the base model's attention, head by head",
        "windows": told(recipe.windows),
        "windows of made-up lookups": len(recipe.lookup_windows),
        "windows for the dial": told(recipe.dial_windows),
        "seed": recipe.seed,
        "seconds": round(seconds),
        "recipe": {k: v for k, v in asdict(recipe).items() if k in DECIDE},
    }
