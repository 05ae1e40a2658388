"""What training adds to a call: assignments with a gradient. Their backward moves the balance potentials."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks, routing
from ..attention import HARD_GATE
from .call import Call
from .layer import FocusLayer


def is_soft(router: FocusLayer, adapter_name: str, *, cached_tokens: int) -> bool:
    """Whether a call goes through the gates of training.

    Args:
        router: of the layer.
        adapter_name: whose centroids.
        cached_tokens: that the call continues.

    Raises:
        ValueError: soft, and the call continues a cache or the adapter routes by cells.
    """
    if router.mode != "soft" and (router.mode is not None or not _learns(router, adapter_name, not cached_tokens)):
        return False
    if router.configs[adapter_name].by_cells:
        raise ValueError(
            "An adapter that routes by cells is fitted (focus-hf fit), not trained by gradient, and has no soft mode. "
            'Route it with focus_hf.set_routing(model, mode="hard").'
        )
    if cached_tokens:
        raise ValueError(
            "Soft routing looks at whole sequences and cannot continue a cache. Generate in hard mode: "
            'focus_hf.set_routing(model, mode="hard").'
        )
    return True


def _learns(router: FocusLayer, adapter_name: str, starts: bool) -> bool:
    """Whether a call gives gradients to centroids: in training, and in eval mode where that changes no value, with the
    hard gate. One that continues a cache (does not start its sequences) cannot, and is an error in training only.
    """
    config = router.configs[adapter_name]
    if not torch.is_grad_enabled() or config.by_cells or not router.focus_centroids[adapter_name].requires_grad:
        return False
    return router.training or (starts and config.gate == HARD_GATE)


def assignments_of(call: Call, scores: Tensor, balance: Tensor, valid: Tensor | None) -> Tensor:
    """Sinkhorn's assignments of whole sequences, or hard ones with their gradient.

    In training, their backward pass moves the balance potentials.

    Args:
        call: that is made.
        scores: float32 ``(B, T, K)``.
        balance: float32 ``(K,)``, the potentials so far.
        valid: bool ``(B, T)``, ``False`` for padding; ``None`` if there is none.

    Returns:
        ``(B, T, K)``.
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
