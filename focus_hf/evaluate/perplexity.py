"""Losses of single tokens, and the perplexities made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adapter import observe_pairs
from .copies import far_copies
from .modes import device_of, in_evaluation


@torch.no_grad()
def token_losses(
    model: nn.Module, windows: Tensor, batch_size: int = 4, look: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """Negative log-likelihood of every token but the first of its window.

    Args:
        model: a causal language model.
        windows: token ids ``(N, T)``, ``T >= 2``, without padding; each window is read from scratch.
        batch_size: windows at a time.
        look: called with the number of each window and its logits, float32 ``(T - 1, V)``.

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
            batch = batch.to(device_of(model))
            logits = model(input_ids=batch, use_cache=False).logits
            # One row at a time: float32 logits of a whole batch can be larger than the model.
            for row, ids in zip(logits, batch, strict=True):
                predicted = row[:-1].float()
                if look is not None:
                    look(len(losses), predicted)
                losses.append(F.cross_entropy(predicted, ids[1:], reduction="none"))
    return torch.stack(losses).cpu()


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
    def of(cls, ids: Tensor, length: int, stride: int) -> SlidingWindows:
        """Cut a text.

        Args:
            ids: token ids ``(n,)``.
            length: tokens per window.
            stride: tokens from one window's start to the next, 1 to ``length``; with ``length`` nothing overlaps.

        Raises:
            ValueError: the text is shorter than a window, or the stride is out of range.
        """
        if not 1 <= stride <= length:
            raise ValueError(f"stride must be from 1 to the window's length ({length}), got {stride}.")
        if ids.numel() < length:
            raise ValueError(
                f"The text has {ids.numel()} tokens, fewer than one window of {length}. "
                "Give more text or a shorter window."
            )
        windows = ids.unfold(0, length, stride)
        scored = torch.ones(windows.shape[0], length - 1, dtype=torch.bool)
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


def paired_excess(losses: Tensor, dense: Tensor, scored: Tensor) -> tuple[float, float | None]:
    """How much more a token costs than under dense attention, and how sure that is.

    Args:
        losses, dense: of the same windows, ``(N, T - 1)`` in nats.
        scored: bool, the predictions that count.

    Returns:
        Mean difference in nats per token, and its standard error over windows (paired); ``None`` with one window.
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
    positions = torch.arange(1, losses.shape[1] + 1)
    return [
        {
            "first": int(stretch[0]),
            "last": int(stretch[-1]),
            "loss": losses[:, int(stretch[0]) - 1 : int(stretch[-1])].double().mean().item(),
        }
        for stretch in positions.tensor_split(min(buckets, losses.shape[1]))
    ]


@torch.no_grad()
def attended_share(model: nn.Module, windows: Tensor, batch_size: int = 4) -> float:
    """Share of possible pairs that the routed layers attend to in the current mode, see `observe_pairs`.

    Raises:
        ValueError: no Focus adapter is active.
    """
    with in_evaluation(model), observe_pairs(model) as pairs:
        for batch in windows.split(batch_size):
            model(input_ids=batch.to(device_of(model)), use_cache=False)
    return pairs.share
