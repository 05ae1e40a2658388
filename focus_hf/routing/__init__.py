"""Routing: which group a key is in, and which groups a query reads, at which distance.

Pure torch. `shared` is the paper's: one routing for all heads of a layer, made of hidden states. `cells` routes each
key/value head by itself, made of its keys and queries.
"""

from .shared import (
    BALANCE_RATE,
    NO_MASS,
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
    without_autocast,
)

__all__ = [
    "BALANCE_RATE",
    "NO_MASS",
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
    "without_autocast",
]
