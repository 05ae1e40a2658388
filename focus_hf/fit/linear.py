"""Linear readings of hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

#: Weight of the penalty, as a share of the mean variance of a hidden state's coordinates.
_PENALTY = 1e-4


def ridge(inputs: Tensor, targets: Tensor) -> Tensor:
    """Least squares with a small penalty: the linear map from inputs to targets, both taken about their means.

    Args:
        inputs: ``(N, d)``.
        targets: ``(N, M)``.

    Returns:
        float32 ``(M, d)``.
    """
    inputs, targets = inputs - inputs.mean(dim=0), targets - targets.mean(dim=0)
    gram = (inputs.T @ inputs).double()
    penalty = _PENALTY * gram.diagonal().mean().clamp(min=1e-12)
    gram.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(gram)
    return torch.cholesky_solve((inputs.T @ targets).double(), factor).T.float()
