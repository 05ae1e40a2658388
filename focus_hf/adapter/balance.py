"""Balance while centroids train: its potentials move with every backward pass, and all processes agree on them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks, routing
from .layer import FocusLayer


def balanced_assignments(
    router: FocusLayer, adapter_name: str, scores: Tensor, balance: Tensor, valid: Tensor | None
) -> Tensor:
    """Sinkhorn's assignments of whole sequences; in training, their backward pass moves the balance potentials.

    Args:
        router: whose centroids made the scores.
        adapter_name: likewise.
        scores: float32 ``(B, T, K)``.
        balance: float32 ``(K,)``, the potentials so far.
        valid: bool ``(B, T)``, ``False`` for padding; ``None`` if there is none.

    Returns:
        ``(B, T, K)``.
    """
    config = router.configs[adapter_name]
    factor = routing.sharpening(scores, config.training_sharpness, valid)
    assignments, potentials = routing.balanced_assignments(
        factor * scores, factor * balance, config.sinkhorn_iterations, valid
    )
    if router.training and scores.requires_grad:
        step = routing.balance_step(scores, balance, config.top_k, valid, router.balance_rate)
        step = torch.where(balance.any(), step, (potentials / factor).mean(dim=(0, 1)))  # Sinkhorn's to start from
        # In the backward pass: gradient checkpointing computes this forward twice, and both must agree.
        assignments.register_hook(lambda gradient: _move(router, adapter_name, step))
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
