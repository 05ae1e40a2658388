"""Routing: which group a key is in, and which groups a query reads, at which distance.

Pure torch. `shared` is the paper's: one routing for all heads of a layer, made of hidden states. `cells` routes each
key/value head by itself, made of its keys and queries.

Shapes: ``B`` sequences, ``T`` tokens, ``K`` groups, ``d`` hidden size, ``d_g`` group dimension. ``valid``, where it is
asked for, is bool ``(B, T)``, ``False`` for padding, which takes no part; ``None`` if there is none.
"""

from .shared import (
    BALANCE_RATE,
    balance_step,
    balanced_assignments,
    balanced_scores,
    calibrate_balance,
    group_scores,
    group_shares,
    hard_memberships,
    score_spread,
    sharpening,
    sinkhorn,
    straight_through,
)

__all__ = [
    "BALANCE_RATE",
    "balance_step",
    "balanced_assignments",
    "balanced_scores",
    "calibrate_balance",
    "group_scores",
    "group_shares",
    "hard_memberships",
    "score_spread",
    "sharpening",
    "sinkhorn",
    "straight_through",
]
