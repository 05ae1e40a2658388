"""An attention problem as one value: tensors, who may attend to whom, and how scores are made.

Everything that computes Focus attention takes a `Problem` and documents only what it does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .mask import WhoAttends

#: Of heads: neighbours, which make a view, or any.
Selection = slice | list[int]


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

    def part(self, rows: slice, columns: slice) -> Scores:
        """The scores of some pairs.

        Args:
            rows: which queries, counted from the first of the ``Q``.
            columns: which of the ``S`` keys.
        """
        return self if self.bias is None else replace(self, bias=self.bias[:, :, rows, columns])

    def select(self, sequences: slice, heads: Selection) -> Scores:
        """Those of some sequences and query heads."""
        bias, logits = self.bias, self.sink_logits
        if bias is not None:
            bias = bias if bias.shape[0] == 1 else bias[sequences]
            bias = bias if bias.shape[1] == 1 else bias[:, heads]
        return replace(self, bias=bias, sink_logits=None if logits is None else logits[heads])


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

    def sequence(self, row: int) -> Problem:
        """One sequence of the batch, as a batch of one."""
        one = slice(row, row + 1)
        return Problem(
            self.query[one],
            self.key[one],
            self.value[one],
            self.who.sequence(row),
            self.scores.select(one, slice(None)),
        )

    def select_heads(self, kv_heads: Sequence[int]) -> Problem:
        """The part of some key/value heads, with the query heads that read them; views of adjacent heads."""
        repeat = self.query.shape[1] // self.key.shape[1]
        keys = _adjacent(kv_heads)
        queries = _adjacent([head * repeat + i for head in kv_heads for i in range(repeat)])
        mask = self.who.extra_mask
        return Problem(
            self.query[:, queries],
            self.key[:, keys],
            self.value[:, keys],
            self.who if mask is None or mask.shape[1] == 1 else replace(self.who, extra_mask=mask[:, queries]),
            self.scores.select(slice(None), queries),
        )

    def fold_heads(self, memberships: Tensor, reads: Tensor | None) -> Problem:
        """Key/value heads that route by themselves, as sequences of one key/value head each.

        Only for plain scores without sink logits and without a mask of the model's own.

        Args:
            memberships: ``(B, H_kv, S, K)`` bool.
            reads: likewise, or ``None``.

        Returns:
            A problem of ``B * H_kv`` sequences; `unfold_heads` brings its output back.
        """
        kv_heads = self.key.shape[1]
        positions, documents = (
            None if x is None else x.repeat_interleave(kv_heads, dim=0)
            for x in (self.who.positions, self.who.documents)
        )
        assert positions is not None
        who = WhoAttends(
            self.who.pattern,
            positions,
            memberships.flatten(0, 1),
            documents,
            reads=None if reads is None else reads.flatten(0, 1),
            known=self.who.known,
        )
        return Problem(
            self.query.unflatten(1, (kv_heads, -1)).flatten(0, 1),
            self.key.flatten(0, 1)[:, None],
            self.value.flatten(0, 1)[:, None],
            who,
            self.scores,
        )

    def detach(self) -> Problem:
        """The same values, without a gradient."""
        logits, bias = self.scores.sink_logits, self.scores.bias
        scores = replace(
            self.scores,
            sink_logits=None if logits is None else logits.detach(),
            bias=None if bias is None else bias.detach(),
        )
        return replace(
            self, query=self.query.detach(), key=self.key.detach(), value=self.value.detach(), scores=scores
        )

    def take_apart(self) -> tuple[tuple[Tensor | None, ...], Callable[..., Problem]]:
        """All its tensors, and what makes it of them again: autograd functions have to save tensors one by one."""
        pattern = self.who.pattern
        scale, softcap, dropout = self.scores.scale, self.scores.softcap, self.scores.dropout
        who, logits, bias = self.who, self.scores.sink_logits, self.scores.bias
        tensors = (self.query, self.key, self.value, who.positions, who.memberships, who.documents, who.extra_mask)

        def put_together(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            positions: Tensor,
            memberships: Tensor,
            documents: Tensor | None,
            extra_mask: Tensor | None,
            sink_logits: Tensor | None,
            bias: Tensor | None,
        ) -> Problem:
            who = WhoAttends(pattern, positions, memberships, documents, extra_mask)
            return Problem(query, key, value, who, Scores(scale, softcap, sink_logits, dropout, bias))

        return (*tensors, logits, bias), put_together


def _adjacent(heads: Sequence[int]) -> Selection:
    """These heads as a slice, which makes a view, if they are neighbours in ascending order."""
    first = heads[0]
    return slice(first, first + len(heads)) if list(heads) == list(range(first, first + len(heads))) else list(heads)
