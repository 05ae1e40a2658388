"""Where a fit writes, and what it finds there: fitted layers are kept beside the adapter until they are not wanted."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import load_results
from ..records.typed import is_number
from ..texts import Texts
from .recipe import FitRecipe

#: Folder of fitted layers, inside the adapter's.
LAYERS = "fit"

#: Fields of a recipe that decide what layers are fitted to; others may change when they are used again.
DECIDE = (
    *("seq_len", "windows", "dial_windows", "lookups", "rows", "steps", "seed"),
    *("num_groups", "group_dim", "local_window", "sink_tokens", "num_bands", "each_query_head"),
)


def prepare_folder(recipe: FitRecipe) -> Path:
    """The folder to write to, before hours of work: it can be written to, and nothing in it is lost unasked.

    Raises:
        ValueError: it cannot, or an adapter or fitted layers are there that are neither to be used nor replaced.
    """
    out = recipe.check_output_dir()
    if any((out / LAYERS).glob("*.safetensors")) and not recipe.resume:
        if not recipe.overwrite:
            raise ValueError(f"{out} holds fitted layers: pass --resume to use them, or --overwrite.")
        shutil.rmtree(out / LAYERS)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"output_dir {out} cannot be written to ({error.strerror}): name another folder.") from None
    return out


def check_scratch(size: int, recipe: FitRecipe) -> None:
    """Make sure that captured tensors of so many bytes find room.

    Raises:
        ValueError: they do not, or their folder does not exist.
    """
    folder = Path(recipe.scratch_dir or tempfile.gettempdir())
    if not folder.is_dir():
        raise ValueError(f"scratch_dir {folder} is no folder: make it, or name another.")
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ValueError(
            f"{folder} has {free / 1e9:.1f} GB free, and captured tensors take {size / 1e9:.1f} GB at once: free "
            "some, name another scratch_dir, or let them come in more passes (a smaller scratch_gb)."
        )


def fingerprint(recipe: FitRecipe, texts: Sequence[Texts], commit: str | None) -> str:
    """What stands for everything that fitted layers depend on."""
    facts = {name: getattr(recipe, name) for name in DECIDE}
    facts |= {"model": recipe.model, "commit": commit, "dtype": recipe.dtype}
    facts["texts"] = [[text.name, text.revision] for text in texts]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def seconds_before(folder: Path) -> float:
    """What it took to fit the layers that are used again, as far as it is known."""
    results = load_results(folder)
    seconds: Any = None if results is None else results.training.get("seconds")
    return float(seconds) if is_number(seconds) else 0.0
