"""Tokens that were seen before, out of the window: what far attention is good for first of all.

Sun et al. (arXiv 2109.09115) find that far context helps little but with tokens that stood there already. A mean over
all tokens hides them, so their loss stands by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def far_copies(windows: Tensor, local_window: int) -> Tensor:
    """Predictions whose token followed the same token before, in this window of text and out of reach only.

    The bigram of a token and the one before it occurred earlier, and every time the token to copy was more than
    ``local_window`` before the token that predicts.

    Args:
        windows: token ids ``(N, T)``.
        local_window: ``w``.

    Returns:
        bool ``(N, T - 1)``, one entry for each predicted token.
    """
    bigrams = windows[:, :-1] * (windows.max() + 1) + windows[:, 1:]
    order = bigrams.argsort(dim=1, stable=True)
    ranked = bigrams.gather(1, order)
    again = torch.zeros_like(ranked, dtype=torch.bool)
    again[:, 1:] = ranked[:, 1:] == ranked[:, :-1]
    since = order - order.roll(1, dims=1)  # from the last time that the bigram occurred
    # The token to copy is the second one of the earlier bigram; the token that predicts is the first one of this.
    far = again & (since - 1 > local_window)
    return torch.zeros_like(far).scatter_(1, order, far)
