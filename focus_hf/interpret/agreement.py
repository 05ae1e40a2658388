"""How well groups agree with categories, beside what chance and a lookup by token would give."""

from __future__ import annotations

import math

import numpy as np


def count_table(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """How often each pair of two integer arrays ``(n,)`` occurs: int64 counts of this shape."""
    places = np.ravel_multi_index((rows, columns), shape)
    return np.bincount(places, minlength=math.prod(shape)).reshape(shape)


def agreement(table: np.ndarray) -> dict[str, float]:
    """Compare two labellings by their contingency table (scikit-learn's metrics).

    Args:
        table: counts ``(groups, categories)``.

    Returns:
        ``nmi``, normalised mutual information, 0 to 1; ``ami``, the adjusted one: 0 is chance.

    Raises:
        ValueError: it is empty.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn import metrics

    if not table.any():
        raise ValueError("No token has a gold category: is the treebank's text what the tokenizer saw?")
    groups, categories = (np.repeat(labels.ravel(), table.ravel()) for labels in np.indices(table.shape))
    return {
        "nmi": float(metrics.normalized_mutual_info_score(categories, groups)),
        "ami": float(metrics.adjusted_mutual_info_score(categories, groups)),
    }


def random_table(table: np.ndarray, seed: int) -> np.ndarray:
    """The table of balanced groups that know nothing: the first baseline."""
    categories = np.repeat(np.arange(table.shape[1]), table.sum(axis=0))
    groups = np.random.default_rng(seed).permutation(np.arange(len(categories)) % table.shape[0])
    return count_table(groups, categories, table.shape)


def lookup_table(by_token: np.ndarray, gold_by_token: np.ndarray) -> np.ndarray:
    """The table of groups without context, each token where its kind is most often: the second baseline.

    Args:
        by_token: counts ``(kinds of tokens, K)``.
        gold_by_token: counts ``(kinds of tokens, categories)``.
    """
    result = np.zeros((by_token.shape[1], gold_by_token.shape[1]), dtype=np.int64)
    np.add.at(result, by_token.argmax(axis=1), gold_by_token)
    return result


def contextual_share(by_token: np.ndarray) -> float:
    """Share of tokens that are in another group than most of their kind: 0 is a lookup by token."""
    return float(1 - by_token.max(axis=1).sum() / by_token.sum())
