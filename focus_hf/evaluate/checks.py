"""Checks that windows of token ids and a model fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .perplexity import perplexity

#: Windows on which a tokenizer is found not to fit, and tokens of each.
_PROBED, _PROBED_TOKENS = 4, 256


def check_vocabulary(windows: Tensor, vocabulary: int, source: str) -> None:
    """Make sure that a tokenizer belongs to a model: `ValueError` for a token id that the model does not have."""
    largest = int(windows.max())
    if largest >= vocabulary:
        raise ValueError(
            f"The tokenizer does not fit the model: {source} has token id {largest}, the model's vocabulary ends at "
            f"{vocabulary - 1}. Name the model's own tokenizer."
        )


def check_length(length: int, config: Any) -> None:
    """Make sure that windows fit into a model's positions: `ValueError` if they do not."""
    positions = getattr(config, "max_position_embeddings", None)
    if length < 2:
        raise ValueError(f"seq_len must be at least 2, got {length}.")
    if positions is not None and length > positions:
        raise ValueError(f"seq_len is {length}, but the model has {positions} positions. Use at most {positions}.")


def check_positions(model: Any, lengths: Sequence[int]) -> None:
    """`check_length` where positions are a table: it ends; a rotation does not, though quality may."""
    if not any("rotary" in type(module).__name__.lower() for module in model.modules()):
        for length in lengths:
            check_length(length, model.config)


def check_tokenizer(model: nn.Module, windows: Tensor) -> None:
    """Make sure that a model predicts windows of text ``(N, T)`` better than chance: `ValueError` if it does not."""
    chance = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    measured = perplexity(model, windows[:_PROBED, :_PROBED_TOKENS], batch_size=1)
    if not measured < 2 * chance:  # an untrained model is at chance
        raise ValueError(
            f"The base model predicts this text worse than chance (perplexity {measured:,.0f}, chance is {chance:,}): "
            "the tokenizer does not fit the model, or the weights are not those of a language model."
        )
