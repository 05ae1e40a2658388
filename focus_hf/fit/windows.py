"""Windows of text to look at: from every source alike, spread over it, none overlapping another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..texts import Texts, first_tokens, tokenize
from .lookups import lookups
from .recipe import FitRecipe

#: Enough for most text; what yields fewer tokens is read whole.
_CHARACTERS_PER_TOKEN = 8


def windows_of(recipe: FitRecipe, texts: Sequence[Texts], tokenizer: Any) -> list[tuple[Texts, Tensor]]:
    """The windows of a fit, in the order of ``recipe.lengths``: of these texts, and of made-up lookups.

    Returns:
        of each which text it is of, and its tokens, int64 ``(T,)``.

    Raises:
        ValueError: a text is too short for its windows.
    """
    lengths, made_up = recipe.lengths, recipe.lookup_windows

    def spread(numbers: Sequence[int], sources: Sequence[Texts]) -> dict[int, tuple[Texts, Tensor]]:
        windows = spread_windows(sources, tokenizer, [lengths[number] for number in numbers], recipe.seed)
        return {n: (sources[i % len(sources)], ids) for i, (n, ids) in enumerate(zip(numbers, windows, strict=True))}

    enough = sum(lengths[number] for number in made_up)  # a line has at least a token
    found = spread(made_up, [lookups(texts, enough, recipe.seed)])
    found |= spread([number for number in range(len(lengths)) if number not in made_up], texts)
    return [found[number] for number in range(len(lengths))]


def spread_windows(texts: Sequence[Texts], tokenizer: Any, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """A window for each length asked for, from the texts in turn.

    A text is divided into as many stretches as windows come from it, in random order, and a window is the beginning of
    its stretch.

    Args:
        texts: the sources.
        tokenizer: a transformers tokenizer.
        lengths: tokens of each window.
        seed: of the order.

    Returns:
        int64 ``(T,)`` each, in the order of ``lengths``.

    Raises:
        ValueError: a text is too short for its windows.
    """
    generator = torch.Generator().manual_seed(seed)
    windows: dict[int, Tensor] = {}
    for number, text in enumerate(texts):
        mine = range(number, len(lengths), len(texts))
        whole = "\n\n".join(text.documents)
        share = len(whole) / max(1, sum(lengths[window] for window in mine))
        start = 0.0
        for place in torch.randperm(len(mine), generator=generator).tolist():
            window = mine[place]
            end = start + share * lengths[window]
            windows[window] = _beginning(whole[int(start) : int(end)], tokenizer, lengths[window], text, len(mine))
            start = end
    return [windows[number] for number in range(len(lengths))]


def _beginning(stretch: str, tokenizer: Any, length: int, text: Texts, count: int) -> Tensor:
    for size in (_CHARACTERS_PER_TOKEN * length, len(stretch)):
        ids = first_tokens(tokenizer) + tokenize(tokenizer, stretch[:size])
        if len(ids) >= length:
            return torch.tensor(ids[:length])
    raise ValueError(
        f"{text.name} is too short for {count} windows: a stretch of it has {len(ids)} tokens, a window {length}. "
        "Give more text, fewer windows or a shorter seq_len."
    )
