"""Text that repeats what stands far back, and what keeping pairs of it away from a head does to finding it again.

The Fisher cost (`importance`) is that of small changes. Where a model is sure of what comes next, as in the middle of
a copy, it is next to nothing, and yet a head that no longer finds the original can make the model say something else.
So spans of a window are made copies of earlier ones, and for tokens that dense attention recalls from there the
*log-odds* of the right token take the place of the log-likelihood of a drawn one: their change does not vanish where
the model is sure. That few heads recall, and others matter most on ordinary text, is known from DuoAttention (arXiv
2410.10819), which finds them by passkeys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Tokens of a copied span.
SPAN = 32

#: A window has one copy in each stretch of so many tokens, but in its first quarter.
STRETCH = 256


def with_copies(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make spans of a window copies of earlier spans, anywhere before them.

    Args:
        ids: int64 ``(T,)``.
        generator: of their places.

    Returns:
        The window with copies, and which of its tokens are copied, bool ``(T,)``.
    """
    ids, copied = ids.clone(), torch.zeros(len(ids), dtype=torch.bool)
    stretch = min(STRETCH, len(ids) // 4)
    span = min(SPAN, stretch // 2)
    for first in range(len(ids) // 4, len(ids) - stretch + 1, stretch):
        to = first + _below(stretch - span + 1, generator)
        source = _below(to - span + 1, generator)
        ids[to : to + span], copied[to : to + span] = ids[source : source + span].clone(), True
    return ids, copied


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (), generator=generator))


def slope_of_recall(logits: Tensor, ids: Tensor, copied: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient by the logits of what stands for recall: the sum of recalled tokens' log-odds, with random signs.

    Recalled is a copied token that is the model's first choice. Signs are random so that in the mean of squares no
    token's change meets another's, and the sum is scaled so that this mean, over all queries of the window, is one for
    each recalled token.

    Args:
        logits: float32 ``(T, V)``.
        ids: int64 ``(T,)``.
        copied: bool ``(T,)``, see `with_copies`.
        generator: of the signs.

    Returns:
        float32 ``(T, V)``; zeros if nothing was recalled.
    """
    following = ids[1:].to(logits.device)
    recalled = copied[1:].to(logits.device) & (logits[:-1].argmax(dim=-1) == following)
    at = recalled.nonzero().squeeze(-1)
    slope = torch.zeros_like(logits)
    if not len(at):
        return slope
    right = following[at, None]
    of_odds = logits[at].scatter(1, right, float("-inf")).softmax(dim=-1).neg_().scatter_(1, right, 1.0)
    signs = torch.randint(2, (len(at), 1), generator=generator).to(of_odds) * 2 - 1
    slope[at] = of_odds * signs * math.sqrt(len(ids) / len(at))
    return slope
