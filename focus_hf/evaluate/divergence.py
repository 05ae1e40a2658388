"""How far a way of attending takes a model's predictions from those of dense attention.

Perplexity above dense attention's says whether a text became less likely, which a change for the worse need not do
where the model is no judge of the text. The Kullback-Leibler divergence says how much changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens that are told apart at each position, the likeliest; the others count as one, so that nothing grows with the
#: vocabulary. A bound from below, and for such a number of tokens a close one.
LIKELIEST = 256


class Divergence:
    """Of predictions from the first ones that were seen: windows are looked at in order, again and again."""

    def __init__(self) -> None:
        self._first: list[tuple[Tensor, Tensor]] = []
        self._found: list[Tensor] = []

    def look(self, window: int, logits: Tensor) -> None:
        """Keep the predictions of a window, or compare them with those that were kept.

        Args:
            window: its number.
            logits: float32 ``(T - 1, V)``.
        """
        predicted = logits.log_softmax(dim=-1)
        if window == len(self._first):
            best, tokens = predicted.topk(min(LIKELIEST, predicted.shape[-1]), dim=-1)
            self._first.append((tokens.to(torch.int32), best))
        tokens, first = self._first[window]
        here = _with_the_rest(predicted.gather(-1, tokens.long()))
        first = _with_the_rest(first)
        self._found[window:] = [(first.exp() * (first - here)).sum(dim=-1).clamp(min=0).cpu()]

    def mean(self, scored: Tensor) -> float:
        """``sum_y p(y) log(p(y) / q(y))`` with ``p`` of the first pass and ``q`` of the last one, in nats.

        Args:
            scored: bool ``(N, T - 1)``, the predictions that count.
        """
        return torch.stack(self._found)[scored].double().mean().item()


def _with_the_rest(log_shares: Tensor) -> Tensor:
    """And the logarithm of what they leave of 1, as far as rounding tells."""
    rest = 1 - log_shares.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_shares, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], dim=-1)
