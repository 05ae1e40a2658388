"""What is left beside an adapter that was made: a sample of tokens with their groups, its figures, a picture."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapter import HeadView, Router, final_scores, focus_layers, observe_routing, routing_mode
from ..records import Results, TokenSample, save_results
from ..records.adapter_files import GROUPS_FILE, weights_hash
from .figures import quality_figure
from .modes import device_of, in_evaluation
from .quality import QualityRow

#: Tokens of a sample, unless the window is shorter.
LENGTH = 256

#: Picture of perplexity against pairs, in the folder of pictures.
_QUALITY = "quality.png"


@torch.no_grad()
def take_sample(model: nn.Module, ids: Tensor, weights_sha256: str = "") -> TokenSample:
    """Record the groups of the first `LENGTH` tokens of a text ``(n,)``, as the adapter in a model routes them."""
    ids = ids[:LENGTH]
    groups: dict[str, list[int]] = {}
    reads: dict[str, list[int]] = {}

    def keep(router: Router, scores: Tensor, memberships: Tensor) -> None:
        name = router.name.removeprefix("base_model.model.")  # as in the base model, wrapped or not
        groups[name] = final_scores(router, scores[0]).argmax(dim=-1).tolist()
        if isinstance(router, HeadView):
            reads[name] = router.reads[0].flatten(1).sum(dim=-1).tolist()

    with in_evaluation(model), routing_mode(model, "hard"), observe_routing(model, keep):
        model(input_ids=ids[None].to(device_of(model)), use_cache=False)
    top_k = focus_layers(model)[0].routing_config.top_k
    return TokenSample(ids.tolist(), groups, top_k, weights_sha256, reads)


def replace_sample(sample: TokenSample, folder: Path) -> None:
    """Write a sample of tokens with their groups, and remove what was said of the groups before."""
    figures = folder / "figures"
    for stale in (folder / GROUPS_FILE, figures / _QUALITY, *figures.glob("groups-*.png")):
        stale.unlink(missing_ok=True)
    replace(sample, weights_sha256=weights_hash(folder)).save(folder)


def write_records(results: Results, folder: Path) -> None:
    """Write the figures of the weights in a folder, as far as they are known, and their picture."""
    results.weights_sha256 = weights_hash(folder)
    save_results(results, folder)
    for evaluation in results.evaluations[:1]:
        with contextlib.suppress(ModuleNotFoundError):  # figures without a picture are still figures
            quality_figure([QualityRow(**row) for row in evaluation.rows], folder / "figures" / _QUALITY)
