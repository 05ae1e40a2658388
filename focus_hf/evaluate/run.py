"""A whole evaluation: texts, context lengths, modes, the retrieval probe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..adapter import focus_layers
from ..machine import measured_with
from ..records import Evaluation, Results
from ..texts import Texts
from .checks import check_positions
from .modes import Mode, list_modes, with_cache
from .perplexity import SlidingWindows
from .quality import measure_quality
from .retrieval import probe_retrieval

#: Gives the model, the tokenizer and the folder of an adapter that is named, as `focus_hf.hub.load_adapted` does.
Load = Callable[[str], tuple[Any, Any, Path]]


@dataclass
class EvaluationPlan:
    """What to measure.

    Args:
        seq_lens: context lengths in tokens.
        modes: see `MODES`.
        top_ks: for the mode ``"hard"``; the adapter's own if empty.
        budgets: of the adapter, by their shares of pairs, for the mode ``"hard"``; as it attends now if empty.
        stride: tokens from one window's start to the next, as a share of the context length; 1 for no overlap.
        max_tokens: of each text, 0 for all.
        retrieval: context lengths of the retrieval probe; none if empty.
        trials, seed: of the probe, see `probe_retrieval`.
        batch_size: windows at a time.
        count_scoring: what choosing costs, in products, is part of the pairs, of Focus and of its opponents.
    """

    seq_lens: Sequence[int] = (1024,)
    modes: Sequence[str] = ("dense", "local", "hard", "window")
    top_ks: Sequence[int] = ()
    budgets: Sequence[str] = ()
    stride: float = 1.0
    max_tokens: int = 0
    retrieval: Sequence[int] = ()
    trials: int = 16
    batch_size: int = 4
    seed: int = 0
    count_scoring: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.stride <= 1:
            raise ValueError(f"stride must be a share above 0 and at most 1, got {self.stride!r}.")
        for length in (*self.seq_lens, *self.retrieval):
            if length < 2:
                raise ValueError(f"Context lengths must be at least 2 tokens, got {length}.")


@dataclass(frozen=True)
class TokenText:
    """A text as token ids ``(n,)``, what to call it, and the tokens that every window of it begins with."""

    ids: Tensor
    name: str
    revision: str = ""
    dataset: str | None = None
    source: dict[str, Any] = field(default_factory=dict)
    first: Sequence[int] = ()

    @classmethod
    def of(cls, text: Texts, ids: Tensor, first: Sequence[int] = ()) -> TokenText:
        """Token ids of these texts."""
        return cls(ids, text.name, text.revision, text.dataset, text.source, first)


def evaluate(
    model: nn.Module, texts: Sequence[TokenText], plan: EvaluationPlan, tick: Callable[[str], None] = lambda done: None
) -> Results:
    """Measure a model with an active Focus adapter.

    Args:
        model: it keeps its own settings. Adapters trained through hard attention have no ``"soft"`` rows.
        texts: the domain first, others (retention) after it. The first is the hay of the retrieval probe.
        plan: what to measure.
        tick: called after every row, with what it was.

    Returns:
        Evaluations, the probe's rows, and what they were measured with.

    Raises:
        ValueError: a text is too short, or longer than the model's positions allow.
    """
    config = focus_layers(model)[0].routing_config
    if "soft" in plan.modes and not config.has_soft_attention:
        why = "routes by cells" if config.by_cells else 'was trained through hard attention (gate="hard")'
        warnings.warn(f"This adapter {why}, so there is no soft attention to measure.", stacklevel=2)
    modes = modes_of(model, plan)
    check_positions(model, (*plan.seq_lens, *plan.retrieval))
    evaluations = []
    for text, stride, windows in list(_cut(texts, plan)):  # what is too short is said before anything is measured
        length = windows.windows.shape[1]
        rows = []
        for row in measure_quality(model, windows, modes, plan.batch_size, plan.count_scoring):
            rows.append(row.to_dict())
            tick(f"{text.name}, {length} tokens: {row}")
        evaluations.append(
            Evaluation(
                data=text.name,
                context_length=length,
                rows=rows,
                stride=stride,
                tokens=int(windows.scored.sum()),
                revision=text.revision,
                dataset=text.dataset,
                source=text.source,
                copies=int(windows.copies(config.local_window).sum()),
            )
        )
    results = Results(evaluations, measured_with=measured_with())
    if plan.retrieval:
        text, how = texts[0], {"trials": plan.trials, "seed": plan.seed}
        for found in probe_retrieval(model, text.ids, plan.retrieval, modes, first=text.first, **how):
            results.retrieval.append(found.to_dict())
            tick(f"retrieval, {found.length} tokens: {found}")
    return results


def count_ticks(model: nn.Module, texts: int, plan: EvaluationPlan) -> int:
    """How often `evaluate` calls ``tick``."""
    modes = modes_of(model, plan)
    return len(modes) * texts * len(plan.seq_lens) + len(with_cache(modes)) * len(plan.retrieval)


def modes_of(model: nn.Module, plan: EvaluationPlan) -> list[Mode]:
    """Those asked for that this adapter has: see `FocusConfig.has_soft_attention`.

    Raises:
        ValueError: a mode or budget is unknown, or ``top_k`` more than the adapter's groups.
    """
    config = focus_layers(model)[0].routing_config
    if plan.budgets and not config.by_cells:
        raise ValueError(f"pairs={plan.budgets[0]}: this adapter's routing is shared, use top_k.")
    modes = list_modes(plan.modes, plan.top_ks or [config.top_k], list(map(str, plan.budgets)))
    for mode in modes:
        if mode.top_k is not None and not 1 <= mode.top_k <= config.num_groups:
            raise ValueError(f"top_k must be from 1 to num_groups ({config.num_groups}), got {mode.top_k}.")
    return [mode for mode in modes if mode.name != "soft" or config.has_soft_attention]


def _cut(texts: Sequence[TokenText], plan: EvaluationPlan) -> Iterator[tuple[TokenText, int, SlidingWindows]]:
    """Every text at every length, with the stride in tokens."""
    for text, length in product(texts, plan.seq_lens):
        stride = max(1, round(plan.stride * length))
        try:
            yield text, stride, SlidingWindows.of(text.ids[: plan.max_tokens or None], length, stride, text.first)
        except ValueError as error:
            raise ValueError(f"{text.name}: {error}") from None
