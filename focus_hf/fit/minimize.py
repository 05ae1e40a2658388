"""How queries learn: steps of Adam whose rate rises quickly and fades slowly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Queries of a step.
BATCH = 1024

#: Steps until the rate is full: of the random numbers that a fit starts from nothing is left.
_WARMUP = 20


def minimize(loss: Callable[[], Tensor], rates: Mapping[Tensor, float], steps: int) -> None:
    """Change tensors, in place, by so many steps.

    Args:
        loss: what is to fall, of a batch of its own at each call.
        rates: of learning, at most, for each tensor.
        steps: of Adam, with cosine decay.
    """
    groups = [{"params": [tensor.requires_grad_()], "lr": rate} for tensor, rate in rates.items()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    with torch.enable_grad():
        for _ in range(steps):
            found = loss()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            schedule.step()
