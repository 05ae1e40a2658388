"""Prompts of a length in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Any

from .tasks import TASKS, Example


@dataclass(frozen=True)
class Prompt:
    """Token ids of a question, without and with a right answer.

    Args:
        ids: the question, up to where the model goes on.
        answered: the same with a right answer, see `Example.expected`.
        answer_tokens: the last ones of ``answered``, which differ from ``ids``.
        answers: what must be in the model's own answer.
        new_tokens: that it may take.
    """

    ids: list[int]
    answered: list[int]
    answer_tokens: int
    answers: tuple[str, ...]
    new_tokens: int


def make_prompts(tokenizer: Any, task: str, length: int, samples: int, seed: int = 0) -> list[Prompt]:
    """Prompts of a task that fill a context together with the tokens that an answer may take.

    Args:
        tokenizer: of the model; its chat template is used where it has one.
        task: a name in `TASKS`.
        length: tokens of prompt and answer.
        samples: how many; each by itself depends on seed, task and length alone.
        seed: of all choices.

    Raises:
        ValueError: the task does not exist, or does not fit into so few tokens.
    """
    if task not in TASKS:
        raise ValueError(f"RULER's tasks here are {', '.join(TASKS)}; got {task!r}.")
    return [_longest(tokenizer, task, length, f"{seed} {task} {length} {sample}") for sample in range(samples)]


def _longest(tokenizer: Any, name: str, length: int, seed: str) -> Prompt:
    """The prompt with most hay that fits."""
    task = TASKS[name]
    room = length - task.new_tokens

    def made(size: int) -> tuple[Example, list[int]]:
        example = task.make(Random(seed), size, length)
        return example, _prompt_ids(tokenizer, example)

    fits, too_large = task.smallest, 2 * task.smallest
    example, ids = made(fits)
    if len(ids) > room:
        raise ValueError(
            f"RULER's {name} needs at least {len(ids) + task.new_tokens} tokens with this tokenizer, got {length}."
        )
    while (larger := made(too_large)) and len(larger[1]) <= room:
        fits, too_large, (example, ids) = too_large, 2 * too_large, larger
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        tried = made(middle)
        if len(tried[1]) <= room:
            fits, (example, ids) = middle, tried
        else:
            too_large = middle
    answered = _prompt_ids(tokenizer, example, example.expected)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, answered, strict=False)))
    return Prompt(ids, answered, len(answered) - same, example.answers, task.new_tokens)


def _prompt_text(tokenizer: Any, example: Example) -> str:
    """Question and start of the answer, as the model's users write them."""
    if tokenizer.chat_template is None:
        return example.question + example.prefix
    turns = [{"role": "user", "content": example.question}]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return asked + (example.prefix.lstrip() if asked[-1:].isspace() else example.prefix)


def _prompt_ids(tokenizer: Any, example: Example, more: str = "") -> list[int]:
    has_template = tokenizer.chat_template is not None  # which writes its own special tokens
    text = _prompt_text(tokenizer, example) + more
    return list(tokenizer(text, add_special_tokens=not has_template, verbose=False).input_ids)
