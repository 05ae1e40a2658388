"""What routes tokens, as those who observe it see it: a layer, or one of its heads."""

from __future__ import annotations

from torch import Tensor

from .heads import HeadView
from .layer import FocusLayer

#: What routes tokens: a layer for all of its heads, or one head for itself.
Router = FocusLayer | HeadView


def final_scores(router: Router, scores: Tensor) -> Tensor:
    """The scores by which a token's groups are chosen, made of those that `observe_routing` gives.

    Args:
        router: whose they are. Scores of a head hold its balance potentials, those of a layer do not.
        scores: float32 ``(..., K)``.
    """
    if isinstance(router, HeadView):
        return scores
    return scores + router.focus_balance[str(router.routing_adapter)].detach().float().to(scores.device)


def groups_read(router: Router, memberships: Tensor) -> Tensor:
    """The groups whose keys tokens attend to: a layer's are those they belong to, bool ``(B, T, K)``."""
    return router.reads if isinstance(router, HeadView) else memberships
