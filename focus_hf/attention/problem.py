"""An attention problem as one value: tensors, who may attend to whom, and how scores are made.

Everything that computes Focus attention takes a `Problem` and documents only what it does with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .definition import WhoAttends


@dataclass(frozen=True)
class Scores:
    """How the score of a pair is made and becomes its weight.

    Args:
        scale: factor on ``q . k``.
        softcap: ``c`` of ``c * tanh(score / c)`` (Gemma-2), or ``None``.
        sink_logits: ``(H,)``, a learned logit per head that takes part in the softmax and contributes no value
            (gpt-oss), or ``None``.
        dropout: probability of dropping an attention weight.
        bias: ``(B or 1, H or 1, Q, S)``, added to the scores after soft-capping (learned relative positions), or
            ``None``.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    dropout: float = 0.0
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Kernels can compute them."""
        return self.softcap is None and self.dropout == 0.0 and self.bias is None

    def plus(self, bias: Tensor | None) -> Scores:
        """The same with one more bias, if there is one."""
        if bias is None:
            return self
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def part(self, rows: slice, columns: slice) -> Scores:
        """The scores of some pairs.

        Args:
            rows: which queries, counted from the first of the ``Q``.
            columns: which of the ``S`` keys.
        """
        return self if self.bias is None else replace(self, bias=self.bias[:, :, rows, columns])


@dataclass(frozen=True)
class Problem:
    """Attention of the last ``Q`` of ``S`` tokens: whole sequences, or a chunk of new tokens against a longer cache.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)`` with ``H`` a multiple of ``H_kv``.
        value: ``(B, H_kv, S, D_v)``.
        who: who may attend to whom.
        scores: how scores are made.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    who: WhoAttends
    scores: Scores

    @property
    def num_queries(self) -> int:
        """``Q``."""
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        """``S``."""
        return self.key.shape[2]

    @property
    def is_plain(self) -> bool:
        """Kernels can compute it: no soft-capping, dropout or bias, no mask beyond causality, padding, documents."""
        return self.scores.is_plain and self.who.extra_mask is None
