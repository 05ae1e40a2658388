"""Record a sample of tokens with their groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..adapter import HeadView, Router, final_scores, focus_layers, observe_routing, routing_mode
from ..records.sample import TokenSample
from .modes import device_of, in_evaluation

#: Tokens of a sample, unless the window is shorter.
LENGTH = 256


@torch.no_grad()
def take_sample(model: nn.Module, ids: Tensor, weights_sha256: str = "") -> TokenSample:
    """Record the groups of the first tokens of a text, as the adapter routes them when it runs.

    Args:
        model: with an active Focus adapter.
        ids: token ids ``(n,)``; at most `LENGTH` of them are taken.
        weights_sha256: of the adapter, see `focus_hf.records.adapter_files.weights_hash`.
    """
    ids = ids[:LENGTH]
    groups: dict[str, list[int]] = {}
    reads: dict[str, list[int]] = {}

    def keep(router: Router, scores: Tensor, memberships: Tensor) -> None:
        groups[router.name] = final_scores(router, scores[0]).argmax(dim=-1).tolist()
        if isinstance(router, HeadView):
            reads[router.name] = router.reads[0].flatten(1).sum(dim=-1).tolist()

    with in_evaluation(model), routing_mode(model, "hard"), observe_routing(model, keep):
        model(input_ids=ids[None].to(device_of(model)), use_cache=False)
    top_k = focus_layers(model)[0].routing_config.top_k
    # Names as in the base model, whether or not PEFT has wrapped it.
    groups, reads = (
        {name.removeprefix("base_model.model."): found for name, found in one.items()} for one in (groups, reads)
    )
    return TokenSample(ids.tolist(), groups, top_k, weights_sha256, reads)
