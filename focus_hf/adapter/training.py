"""What training adds to a call: assignments with a gradient. Their backward moves the balance potentials."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks, routing
from ..attention import HARD_GATE
from .call import Call
from .layer import FocusLayer


def is_soft(call: Call) -> bool:
    """Whether a call goes through the gates of training.

    With ``mode=None`` one does that gives gradients to centroids: in training, and in eval mode where that changes no
    value, with the hard gate. One that continues a cache cannot, and is an error in training only.

    Raises:
        ValueError: soft, and the call continues a cache or the adapter routes by cells.
    """
    router, config = call.router, call.config
    if router.mode is None:
        learns = torch.is_grad_enabled() and not config.by_cells and router.focus_centroids[call.adapter].requires_grad
        if not learns or not (router.training or (not call.seen and config.gate == HARD_GATE)):
            return False
    elif router.mode != "soft":
        return False
    if config.by_cells:
        raise ValueError(
            "An adapter that routes by cells is fitted (focus-hf fit), not trained by gradient, and has no soft mode. "
            'Route it with focus_hf.set_routing(model, mode="hard").'
        )
    if call.seen:
        raise ValueError(
            "Soft routing looks at whole sequences and cannot continue a cache. Generate in hard mode: "
            'focus_hf.set_routing(model, mode="hard").'
        )
    return True


def assignments_of(call: Call, scores: Tensor, balance: Tensor, valid: Tensor | None) -> Tensor:
    """Sinkhorn's assignments of whole sequences, or hard ones with their gradient: ``(B, T, K)``.

    In training, their backward pass moves the balance potentials.

    Args:
        call: that is made.
        scores, balance: see `FocusLayer.forward`.
        valid: see `valid_tokens`.
    """
    router, config = call.router, call.config
    factor = routing.sharpening(scores, config.training_sharpness, valid)
    assignments, potentials = routing.balanced_assignments(
        factor * scores, factor * balance, config.sinkhorn_iterations, valid
    )
    if router.training and scores.requires_grad:
        step = routing.balance_step(scores, balance, config.top_k, valid, router.balance_rate)
        step = torch.where(balance.any(), step, (potentials / factor).mean(dim=(0, 1)))  # Sinkhorn's to start from
        # In the backward pass: gradient checkpointing computes this forward twice, and both must agree.
        assignments.register_hook(lambda gradient: _move(router, call.adapter, step))
    if config.straight_through or config.gate == HARD_GATE:
        hard = routing.hard_memberships(scores.detach(), balance, config.top_k)
        assignments = routing.straight_through(hard, assignments)
    return assignments


@torch.no_grad()
def _move(router: FocusLayer, adapter_name: str, step: Tensor) -> None:
    """Move the balance potentials, which inference adds to the scores in the place of Sinkhorn."""
    balance = router.focus_balance[adapter_name]
    if not ranks.in_shards(balance):
        balance.add_(step.to(balance.dtype))
    if ranks.several():  # under FSDP that was a passing copy of the shards
        router.balance_steps.append(step)


@torch.no_grad()
def agree_on_balance(router: FocusLayer) -> None:
    """Make the balance potentials the mean over all ranks; every rank must call it, after its backward pass.

    Steps are means over sequences, so this is what one process with all sequences would have.
    """
    adapter_name = router.routing_adapter
    if adapter_name is None:
        return
    parameter = router.focus_balance[adapter_name]
    balance = ranks.whole(parameter)
    if ranks.in_shards(parameter):
        balance = balance + sum(router.balance_steps)
    router.balance_steps.clear()
    ranks.assign(parameter, ranks.mean(balance))
