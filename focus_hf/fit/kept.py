"""Where a fit writes, and what it finds there: fitted layers are kept beside the adapter until they are not wanted."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..records import load_results
from ..records.adapter_files import WEIGHTS_FILE
from ..records.typed import is_number
from ..texts import Texts
from .estimate import Needs
from .layer import LayerFit, load_layer
from .recipe import FitRecipe

#: Folder of fitted layers, inside the adapter's.
LAYERS = "fit"

#: Fields of a recipe that decide what layers are fitted to; others may change when they are used again.
DECIDE = (
    *("seq_len", "windows", "dial_windows", "rows", "steps", "seed"),
    *("num_groups", "group_dim", "local_window", "sink_tokens", "num_bands"),
)


def check_writable(folder: Path) -> None:
    """Make sure that a folder can be made and written to, before hours of work.

    Raises:
        ValueError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"output_dir {folder} cannot be written to ({error.strerror}): name another folder."
        ) from None


def check_scratch(expected: Needs, recipe: FitRecipe) -> None:
    """Make sure that captured tensors find room.

    Raises:
        ValueError: they do not, or their folder does not exist.
    """
    folder = Path(recipe.scratch_dir or tempfile.gettempdir())
    if not folder.is_dir():
        raise ValueError(f"scratch_dir {folder} is no folder: make it, or name another.")
    free = shutil.disk_usage(folder).free
    if free < expected.scratch:
        raise ValueError(
            f"{folder} has {free / 1e9:.1f} GB free, and captured tensors take {expected.scratch / 1e9:.1f} GB at "
            "once: free some, name another scratch_dir, or let them come in more passes (a smaller scratch_gb)."
        )


def refuse_to_overwrite(out: Path, recipe: FitRecipe) -> None:
    """Make sure that nothing is lost: an adapter, or fitted layers.

    Raises:
        ValueError: something is there, and neither ``resume`` nor ``overwrite`` is asked for.
    """
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


def fingerprint(recipe: FitRecipe, texts: Sequence[Texts], commit: str | None) -> str:
    """What stands for everything that fitted layers depend on."""
    facts = {name: getattr(recipe, name) for name in DECIDE}
    facts |= {"model": recipe.model, "commit": commit, "dtype": recipe.dtype}
    facts["texts"] = [[text.name, text.revision] for text in texts]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def layers_at_hand(layers: Iterable[int], recipe: FitRecipe, made_from: str) -> dict[int, LayerFit]:
    """Layers that are fitted already, by number: those of this recipe, of these texts and of this model."""
    kept = {layer: load_layer(layer_file(recipe, layer), made_from) for layer in layers}
    return {layer: found for layer, found in kept.items() if found is not None}


def seconds_before(folder: Path) -> float:
    """What it took to fit the layers that are used again, as far as it is known."""
    results = load_results(folder)
    seconds: Any = None if results is None else results.training.get("seconds")
    return float(seconds) if is_number(seconds) else 0.0


def layer_file(recipe: FitRecipe, layer: int) -> Path:
    """Where a fitted layer is kept."""
    return Path(recipe.output_dir) / LAYERS / f"{layer}.safetensors"
