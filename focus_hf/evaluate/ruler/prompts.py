"""Prompts of a length in the model's own tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from os.path import commonprefix
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
        samples: how many; each by itself depends on ``seed``, task and length alone.

    Raises:
        ValueError: the task does not fit into so few tokens.
    """
    return [_longest(tokenizer, task, length, f"{seed} {task} {length} {sample}") for sample in range(samples)]


def _longest(tokenizer: Any, name: str, length: int, seed: str) -> Prompt:
    """The prompt with most hay that fits."""
    task = TASKS[name]
    room = length - task.new_tokens

    def tokens(size: int) -> int:
        return len(_prompt_ids(tokenizer, task.make(Random(seed), size, length)))

    if (least := tokens(task.smallest)) > room:
        raise ValueError(
            f"RULER's {name} needs at least {least + task.new_tokens} tokens with this tokenizer, got {length}."
        )
    too_large = 2 * task.smallest
    while tokens(too_large) <= room:
        too_large *= 2
    size = bisect_right(range(too_large), room, lo=too_large // 2 + 1, key=tokens) - 1
    example = task.make(Random(seed), size, length)
    ids, answered = _prompt_ids(tokenizer, example), _prompt_ids(tokenizer, example, example.expected)
    same = len(commonprefix([ids, answered]))
    return Prompt(ids, answered, len(answered) - same, example.answers, task.new_tokens)


def _prompt_ids(tokenizer: Any, example: Example, more: str = "") -> list[int]:
    """Question and start of the answer, as the model's users write them."""
    if tokenizer.chat_template is None:
        return list(tokenizer(example.question + example.prefix + more, verbose=False).input_ids)
    turns = [{"role": "user", "content": example.question}]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    asked += (example.prefix.lstrip() if asked[-1:].isspace() else example.prefix) + more
    # A template writes its own special tokens.
    return list(tokenizer(asked, add_special_tokens=False, verbose=False).input_ids)
