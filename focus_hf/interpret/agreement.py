"""How well groups agree with categories, beside what chance and a lookup by token would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """Agreement of one grouping with categories.

    Args:
        nmi: normalised mutual information, 0 to 1.
        ami: adjusted mutual information: 0 is chance.
        v_measure: harmonic mean of homogeneity and completeness.
        purity: share of tokens whose category is the most frequent of their group.
    """

    nmi: float
    ami: float
    v_measure: float
    purity: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def agreement(table: np.ndarray) -> Agreement:
    """Compare two labellings by their contingency table (scikit-learn's metrics).

    Args:
        table: counts ``(groups, categories)``.

    Raises:
        ValueError: it is empty.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn import metrics

    total = int(table.sum())
    if total == 0:
        raise ValueError("No token has a gold category: is the treebank's text what the tokenizer saw?")
    rows, columns = np.indices(table.shape)
    groups = np.repeat(rows.ravel(), table.ravel())
    categories = np.repeat(columns.ravel(), table.ravel())
    return Agreement(
        nmi=float(metrics.normalized_mutual_info_score(categories, groups)),
        ami=float(metrics.adjusted_mutual_info_score(categories, groups)),
        v_measure=float(metrics.v_measure_score(categories, groups)),
        purity=float(table.max(axis=1).sum() / total),
    )


def random_table(table: np.ndarray, seed: int) -> np.ndarray:
    """The table of balanced groups that know nothing: the first baseline."""
    generator = np.random.default_rng(seed)
    categories = np.repeat(np.arange(table.shape[1]), table.sum(axis=0))
    groups = generator.permutation(np.arange(len(categories)) % table.shape[0])
    result = np.zeros_like(table)
    np.add.at(result, (groups, categories), 1)
    return result


def lookup_table(by_token: np.ndarray, gold_by_token: np.ndarray) -> np.ndarray:
    """The table of groups without context, each token where its kind is most often: the second baseline.

    Args:
        by_token: counts ``(vocabulary, K)``.
        gold_by_token: counts ``(vocabulary, categories)``.
    """
    result = np.zeros((by_token.shape[1], gold_by_token.shape[1]), dtype=np.int64)
    np.add.at(result, by_token.argmax(axis=1), gold_by_token)
    return result


def contextual_share(by_token: np.ndarray) -> float:
    """Share of tokens that are in another group than most of their kind: 0 is a lookup by token."""
    return float(1 - by_token.max(axis=1).sum() / by_token.sum())


def category_label(
    blocks: np.ndarray, categories: Sequence[str], group: int, *, draws: int, seed: int, least_lift: float = 1.5
) -> dict[str, Any]:
    """The category that a group is about, if the evidence supports one, else ``"mixed"``.

    A category is named if it is the group's most frequent one, is over-represented there (lift: its share in the group
    over its share in the text) and the lower end of a 95 % bootstrap interval of that lift, over blocks of text, is
    above ``least_lift``; and if it holds at least a third of the group.

    Args:
        blocks: counts ``(blocks, K, categories)``.
        categories: their names.
        group: which.
        draws: bootstrap samples.
        seed: of the bootstrap.
        least_lift: see above.

    Returns:
        ``label``, and of the strongest category ``category``, ``share``, ``lift``, ``interval`` (two numbers).
    """
    total = blocks.sum(axis=0)
    if total[group].sum() == 0:
        return {"label": "empty", "category": None, "share": 0.0, "lift": 0.0, "interval": [0.0, 0.0]}
    best = int(total[group].argmax())
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(blocks), size=(draws, len(blocks)))
    lifts = [_lift(blocks[pick].sum(axis=0), group, best) for pick in picks]
    low, high = np.quantile(lifts, [0.025, 0.975])
    share = float(total[group, best] / total[group].sum())
    supported = low > least_lift and share >= 1 / 3
    return {
        "label": categories[best] if supported else "mixed",
        "category": categories[best],
        "share": share,
        "lift": _lift(total, group, best),
        "interval": [float(low), float(high)],
    }


def _lift(counts: np.ndarray, group: int, category: int) -> float:
    members, of_category = counts[group].sum(), counts[:, category].sum()
    if members == 0 or of_category == 0:
        return 0.0
    return float(counts[group, category] / members / (of_category / counts.sum()))
