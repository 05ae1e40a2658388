"""Losses of single tokens, what is made of them, and how far predictions move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapter import PairCount, observe_pairs
from ..texts import cut
from .modes import device_of, in_evaluation

#: Tokens that `Divergence` tells apart at each position, the likeliest; the others count as one, so that nothing grows
#: with the vocabulary. A bound from below, and for such a number of tokens a close one.
LIKELIEST = 256

#: Positions whose predictions are looked at together: over a large vocabulary those of a window take gigabytes.
_ROWS = 256


@torch.no_grad()
def token_losses(
    model: nn.Module, windows: Tensor, batch_size: int = 4, look: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """Negative log-likelihood of every token but the first of its window.

    Args:
        model: a causal language model.
        windows: token ids ``(N, T)``, ``T >= 2``, without padding, each read from scratch, ``batch_size`` at a time.
        look: called for stretches of the windows in order, with a stretch's number and its log-probabilities,
            float32 ``(positions, V)``.

    Returns:
        float32 ``(N, T - 1)`` in nats, on the CPU.

    Raises:
        ValueError: there is nothing to predict.
    """
    if windows.dim() != 2 or windows.shape[0] == 0 or windows.shape[1] < 2:
        raise ValueError(f"token_losses() needs windows of token ids (N, T) with T >= 2, got {tuple(windows.shape)}.")
    losses: list[Tensor] = []
    with in_evaluation(model):
        for batch in windows.split(batch_size):
            for predicted, tokens in _stretches(model, batch.to(device_of(model))):
                if look is not None:
                    look(len(losses), predicted)
                losses.append(F.nll_loss(predicted, tokens, reduction="none"))
    return torch.cat(losses).cpu().view(len(windows), -1)


def _stretches(model: Any, batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities, float32 ``(positions, V)``, and the tokens that came, one window after the other. What they
    are made from is gone with the last of them, before the next windows are read."""
    logits = model(input_ids=batch, use_cache=False).logits
    for row, ids in zip(logits, batch, strict=True):
        for some, tokens in zip(row[:-1].split(_ROWS), ids[1:].split(_ROWS), strict=True):
            yield some.float().log_softmax(dim=-1), tokens


def perplexity(model: nn.Module, windows: Tensor, batch_size: int = 4) -> float:
    """Perplexity over windows of consecutive tokens, each read from scratch, see `token_losses`."""
    return math.exp(token_losses(model, windows, batch_size).double().mean().item())


@dataclass(frozen=True)
class SlidingWindows:
    """A text cut for sliding evaluation: each token is predicted once, with at least ``length - stride`` before it.

    Args:
        windows: token ids ``(N, length)``.
        scored: bool ``(N, length - 1)``: the predictions that count.
    """

    windows: Tensor
    scored: Tensor

    @classmethod
    def of(cls, ids: Tensor, length: int, stride: int, first: Sequence[int] = ()) -> SlidingWindows:
        """Cut a text ``(n,)``; with a stride (from one window's start to the next) of ``length`` nothing overlaps.
        Every window begins with ``first``, see `focus_hf.texts.first_tokens`.

        Raises:
            ValueError: the text is shorter than a window, or the stride is not from 1 to ``length``.
        """
        if not 1 <= stride <= length:
            raise ValueError(f"stride must be from 1 to the window's length ({length}), got {stride}.")
        windows = cut(ids, length, stride, first)
        scored = torch.ones(windows.shape[0], length - 1, dtype=torch.bool)
        scored[:, : max(0, len(first) - 1)] = False
        scored[1:, : max(0, length - 1 - stride)] = False
        return cls(windows, scored)

    def first(self, count: int) -> SlidingWindows:
        """The first windows, for a shorter evaluation."""
        return SlidingWindows(self.windows[:count], self.scored[:count])

    def copies(self, local_window: int) -> Tensor:
        """Those of the predictions that count which repeat what is out of the window, see `far_copies`."""
        return self.scored & far_copies(self.windows, local_window)

    def perplexity(self, losses: Tensor) -> float:
        """From the losses of these windows ``(N, length - 1)``."""
        return math.exp(losses[self.scored].double().mean().item())


def far_copies(windows: Tensor, local_window: int) -> Tensor:
    """Predictions whose token followed the same token before, in this window of text and out of reach only.

    The bigram of a token and the one before it occurred earlier, and every time the token to copy was more than
    ``local_window`` before the token that predicts. Far context helps little but with these (Sun et al., arXiv
    2109.09115), and a mean over all tokens hides them.

    Returns:
        Of token ids ``(N, T)``, bool ``(N, T - 1)``, one entry for each predicted token.
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


def paired_excess(losses: Tensor, dense: Tensor, scored: Tensor) -> tuple[float, float | None]:
    """How much more a token costs than under dense attention, in nats, and the standard error of that over windows.

    Args:
        losses, dense: of the same windows, ``(N, T - 1)`` in nats; one window has no standard error.
        scored: bool, the predictions that count.
    """
    above = (losses - dense).double() * scored
    mean = (above.sum() / scored.sum()).item()
    if len(above) < 2:
        return mean, None
    by_window = above.sum(dim=1) / scored.sum(dim=1)
    return mean, (by_window.std() / len(by_window) ** 0.5).item()


def position_curve(losses: Tensor, buckets: int = 16) -> list[dict[str, float]]:
    """Mean loss by position in the window: where long-range attention matters.

    Args:
        losses: ``(N, T - 1)``, of whole windows.
        buckets: stretches of equal length.

    Returns:
        For each stretch ``first`` and ``last`` position (of the predicted token) and mean ``loss`` in nats.
    """
    curve, last = [], 0
    for stretch in losses.tensor_split(min(buckets, losses.shape[1]), dim=1):
        first, last = last + 1, last + stretch.shape[1]
        curve.append({"first": first, "last": last, "loss": stretch.double().mean().item()})
    return curve


class Divergence:
    """Of predictions from the first ones that were seen: the same stretches of text, in order, again and again.

    Perplexity above dense attention's says whether a text became less likely, which a change for the worse need not
    do where the model is no judge of the text. The Kullback-Leibler divergence says how much changed.
    """

    def __init__(self) -> None:
        self._first: list[tuple[Tensor, Tensor]] = []
        self._found: list[Tensor] = []

    def look(self, stretch: int, predicted: Tensor) -> None:
        """Keep the log-probabilities of a stretch, float32 ``(positions, V)``, or compare them with those kept."""
        if stretch == len(self._first):
            best, tokens = predicted.topk(min(LIKELIEST, predicted.shape[-1]), dim=-1)
            self._first.append((tokens.to(torch.int32), best))
        tokens, first = self._first[stretch]
        here = _with_the_rest(predicted.gather(-1, tokens.long()))
        first = _with_the_rest(first)
        self._found[stretch:] = [(first.exp() * (first - here)).sum(dim=-1).clamp(min=0).cpu()]

    def mean(self, scored: Tensor) -> float:
        """``sum_y p(y) log(p(y) / q(y))`` with ``p`` of the first pass and ``q`` of the last one, in nats, where the
        predictions count: bool ``(N, T - 1)``.
        """
        return torch.cat(self._found).view_as(scored)[scored].double().mean().item()


def _with_the_rest(log_shares: Tensor) -> Tensor:
    """And the logarithm of what they leave of 1, as far as rounding tells."""
    rest = 1 - log_shares.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_shares, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], dim=-1)


def attended_share(model: nn.Module, windows: Tensor, batch_size: int = 4) -> float:
    """Share of possible pairs that the routed layers attend to in the current mode, see `observe_pairs`.

    Raises:
        ValueError: no Focus adapter is active.
    """
    return count_in(model, windows, batch_size).share


@torch.no_grad()
def count_in(model: nn.Module, windows: Tensor, batch_size: int = 4) -> PairCount:
    """What the routed layers attend to in the current mode in windows ``(N, T)``, see `observe_pairs`."""
    with in_evaluation(model), observe_pairs(model) as pairs:
        for batch in windows.split(batch_size):
            model(input_ids=batch.to(device_of(model)), use_cache=False)
    return pairs
