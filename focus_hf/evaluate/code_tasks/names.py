"""The second use of a name in code, by its distance to the first.

Where a name was used once before, copying it is what predicts it: how well a model does so from far back is how well
its far attention works (see also `focus_hf.evaluate.far_copies`).
"""

from __future__ import annotations

import builtins
import io
import keyword
import tokenize
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...texts import first_tokens
from .sources import CodePrompt, Copy, Source, prompts_of

#: Names that say nothing about what was said before.
_KNOWN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"}

#: A start of a module counts if it has a second use for each of so many tokens.
_TOKENS_EACH = 100


def second_uses(code: str, offsets: list[tuple[int, int]]) -> list[Copy]:
    """The second uses of all names in code, their distances from the first use's first token to their own.

    Args:
        code: Python; what comes after a mistake in it is not looked at.
        offsets: of the model's tokens, the characters of each; the code may go on after them.
    """
    places: dict[str, list[tuple[int, ...]]] = {}
    next_token = 0
    for name, start, end in _names(code):
        while next_token < len(offsets) and offsets[next_token][1] <= start:
            next_token += 1
        last = next_token
        while last < len(offsets) and offsets[last][0] < end:
            last += 1
        if last == len(offsets):  # or it may be cut
            break
        places.setdefault(name, []).append(tuple(range(next_token, last)))
    uses = [(found[0], found[1]) for found in places.values() if len(found) > 1 and found[0] and found[1]]
    return sorted((Copy(two, two[0] - one[0]) for one, two in uses), key=lambda use: use.tokens)


def _names(code: str) -> Iterator[tuple[str, int, int]]:
    """Names in the order of the text, with their first character's place and the one after their last."""
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.NAME and token.string not in _KNOWN:
                start = starts[token.start[0] - 1] + token.start[1]
                yield token.string, start, start + len(token.string)
    except (tokenize.TokenError, SyntaxError):
        return


def make_names_prompts(tokenizer: Any, length: int, samples: int, seed: int = 0) -> list[CodePrompt]:
    """The starts of modules of the standard library that have as many tokens.

    Raises:
        ValueError: the tokenizer does not say which characters a token is of (it is no "fast" one), or there are not
            so many modules.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("Names are found by a tokenizer's offsets: load a fast tokenizer (use_fast=True).")
    prompts = prompts_of(f"{seed} names {length}", samples, partial(_prompt, tokenizer, length))
    if len(prompts) < samples:
        raise ValueError(
            f"The standard library has {len(prompts)} modules of {length} tokens, {samples} were asked for. Ask for "
            "fewer samples or shorter ones."
        )
    return prompts


def _prompt(tokenizer: Any, length: int, modules: list[Source]) -> CodePrompt | None:
    """The start of the first module; ``None`` if it is too short, or mostly prose."""
    text = modules[0].text
    if len(text) < length:
        return None
    first = first_tokens(tokenizer)
    read = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    ids, offsets = [*first, *read.input_ids], [(0, 0)] * len(first) + read.offset_mapping
    if len(ids) < length:
        return None
    uses = second_uses(text, offsets[:length])
    enough = len(uses) * _TOKENS_EACH >= length
    return CodePrompt(torch.tensor(ids[:length]), tuple(uses)) if enough else None
