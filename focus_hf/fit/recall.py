"""What a layer's heads do to finding again what stood before.

The Fisher information is that of small changes. Where a model is sure of what comes next, as in the middle of
something that it repeats, it is next to nothing, and yet a head that no longer finds the first place can make it say
something else. So one window is looked at in which spans are copies of earlier ones: for tokens that dense attention
recalls there, the *log-odds* of the right token take the place of the log-likelihood of a drawn one, since their
change does not vanish where the model is sure. (DuoAttention, arXiv 2410.10819, finds heads that recall by passkeys.)
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens of a copied span, and of the stretch in which there is one.
SPAN, STRETCH = 32, 128

#: Rows of logits that are looked at in float32 at once.
_ROWS = 256


def with_copies(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make spans of a window copies of earlier spans, from anywhere before them; none in its first quarter.

    Args:
        ids: int64 ``(T,)``.
        generator: of the places.

    Returns:
        The window with copies, and which of its tokens are copied, bool ``(T,)``.
    """
    ids, copied = ids.clone(), torch.zeros(len(ids), dtype=torch.bool)
    stretch = min(STRETCH, len(ids) // 4)
    span = min(SPAN, stretch // 2)
    for first in range(len(ids) // 4, len(ids) - stretch + 1, stretch or 1):
        to = first + _below(stretch - span + 1, generator)
        source = _below(to - span + 1, generator)
        ids[to : to + span], copied[to : to + span] = ids[source : source + span].clone(), True
    return ids, copied


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (), generator=generator))


def near_copies(copied: Tensor) -> Tensor:
    """Positions at which a copied token is read or predicted, ascending; the first, if there is none: int64."""
    near = copied.clone()
    near[:-1] |= copied[1:]
    near[-1] = False  # predicts nothing
    return near.nonzero().squeeze(-1) if bool(near.any()) else torch.zeros(1, dtype=torch.int64)


def slope_of_recall(logits: Tensor, ids: Tensor, copied: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient by the logits of the log-odds of the tokens that are recalled, added up, in the place of the logits.

    Recalled is a copied token that is the model's first choice. Each has a random sign: in the mean of squares no
    token's change then meets another's.

    Args:
        logits: ``(T, V)``; written to.
        ids: int64 ``(T,)``.
        copied: bool ``(T,)``, see `with_copies`.
        generator: of the signs.
    """
    slope, following = logits.detach(), ids[1:].to(logits.device)
    recalled = copied[1:].to(logits.device)
    for start in range(0, len(slope), _ROWS):
        part = slope[start : start + _ROWS]
        rows, right = part.float(), following[start : start + _ROWS]
        found = recalled[start : start + _ROWS] & (rows[: len(right)].argmax(dim=-1) == right)
        at = found.nonzero().squeeze(-1)
        token = right[at, None]
        others = rows[at].scatter(1, token, float("-inf")).softmax(dim=-1)
        signs = torch.randint(2, token.shape, generator=generator).to(others) * 2 - 1
        part.zero_()
        part[at] = (others.neg_().scatter_(1, token, 1.0) * signs).to(part.dtype)
    return slope
