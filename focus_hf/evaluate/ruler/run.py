"""RULER's tasks, answered in every mode of attention: by generating, and by how likely the right answer is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...records.results import OPPONENTS
from ..modes import Mode, Row, attending, device_of, with_cache
from ..opponents import SINKS
from ..quality import shares_read, with_width
from .prompts import Prompt, make_prompts
from .tasks import TASKS, string_match_all

#: A block in which a model reads what is asked.
Asking = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class RulerPlan:
    """What to ask: ``samples`` prompts of each task, by its name in `TASKS`, at each of some lengths, in tokens of
    prompt and answer; the seed is theirs. In every mode the last ``question_tokens`` of a prompt and its answer read
    ``question_pairs`` of what is before them: what is asked, after a document that was read in that mode.

    Raises:
        ValueError: there is no such task, ``question_tokens`` leaves no document, or it is no share.
    """

    lengths: Sequence[int]
    tasks: Sequence[str] = tuple(TASKS)
    samples: int = 10
    seed: int = 0
    question_tokens: int = 0
    question_pairs: float = 1.0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"RULER's tasks here are {', '.join(TASKS)}; got {task!r}.")
        if not 0 <= self.question_tokens <= min(self.lengths) // 2:
            raise ValueError(
                f"question_tokens is at most half of the shortest length, {min(self.lengths) // 2} tokens, so that "
                f"there is a document before them; got {self.question_tokens}."
            )
        if not 0 < self.question_pairs <= 1:
            raise ValueError(f"question_pairs is a share, above 0 and at most 1; got {self.question_pairs}.")
        if self.question_pairs < 1 and not self.question_tokens:
            raise ValueError(f"question_pairs ({self.question_pairs}) is of question_tokens: give both.")

    def asking(self, model: nn.Module, mode: Mode, document: Tensor) -> Asking:
        """How what is asked is read after a document, ids ``(1, T)``, that was read in a mode."""
        if self.question_tokens == 0:
            return nullcontext
        if self.question_pairs == 1 or mode.name == "dense":
            return partial(attending, model, Mode("dense"))
        if mode.name not in OPPONENTS:
            return partial(attending, model, replace(mode, budget=str(self.question_pairs)))
        keys = round(self.question_pairs * document.shape[1])
        return partial(attending, model, replace(mode, width=max(0, keys - 1 - SINKS)), document)


@dataclass(frozen=True, kw_only=True)
class RulerRow(Row):
    """One task at one length in one mode.

    Args:
        task: its name.
        length: tokens of each prompt with its answer.
        mode, top_k, width, budget: see `Mode`.
        score: mean of `string_match_all` over what the model generated greedily, 0 to 1.
        accuracy: share of the right answer's tokens that are the model's first choice, given those before.
        logprob: log-probability of the right answer in nats per token, given those before.
        pairs: share of the possible pairs that routed layers attend to, on the first prompt; of an opponent on all.
        samples, seed, question_tokens, question_pairs: see `RulerPlan`; ``pairs`` is of the tokens before those.
    """

    task: str
    length: int
    score: float
    accuracy: float
    logprob: float
    pairs: float
    samples: int
    seed: int
    question_tokens: int = 0
    question_pairs: float = 1.0

    def __str__(self) -> str:
        return f"RULER {self.task}, {self.length} tokens: {super().__str__()}"


def measure_ruler(model: Any, tokenizer: Any, plan: RulerPlan, modes: Sequence[Mode]) -> Iterator[RulerRow]:
    """Ask every mode the same questions: one row at a time, for each length, task and mode.

    Args:
        model, tokenizer: with an active Focus adapter; it keeps its own settings.
        plan: what to ask.
        modes: see `list_modes`; soft attention is left out.

    Raises:
        ValueError: a task does not fit into a length.
    """
    kinds = [(task, length) for length in plan.lengths for task in plan.tasks]
    made = [make_prompts(tokenizer, task, length, plan.samples, plan.seed) for task, length in kinds]
    for (task, length), prompts in zip(kinds, made, strict=True):
        first = torch.tensor(prompts[0].ids)[None, : -plan.question_tokens or None]
        for mode in with_cache(modes):
            mode = with_width(model, mode, first, first.shape[1])
            asking = plan.asking(model, mode, first)
            with attending(model, mode, first) as counted:
                answers = [_answer(model, tokenizer, prompt, plan.question_tokens, asking) for prompt in prompts]
                pairs, _ = shares_read(model, mode, counted, first)
            found = {kind: sum(answer[kind] for answer in answers) / len(answers) for kind in answers[0]}
            found |= {"pairs": pairs, "samples": plan.samples, "seed": plan.seed}
            found |= {"question_tokens": plan.question_tokens, "question_pairs": plan.question_pairs}
            yield RulerRow(**mode.columns, task=task, length=length, **found)


def _answer(model: Any, tokenizer: Any, prompt: Prompt, question: int, asking: Asking) -> dict[str, Any]:
    cache = read_question(model, prompt, max(0, question - 1), asking)
    with asking():
        said = generate_answer(model, tokenizer, prompt, copy.deepcopy(cache))
        losses, first_choice = answer_losses(model, prompt, cache)
    return {
        "score": string_match_all(said, prompt.answers),
        "accuracy": first_choice.float().mean().item(),
        "logprob": -losses.mean().item(),
    }


@torch.no_grad()
def read_question(model: Any, prompt: Prompt, last: int = 0, asking: Asking = nullcontext) -> Any:
    """A KV cache with a question in it, but for the last token that is the same whatever the answer: reading a long
    one takes most of the time. The last ones of them, if there are so many, are read in the block of ``asking``.
    """
    ids = torch.tensor(prompt.answered[: -prompt.answer_tokens - 1], device=device_of(model))[None]
    first = max(1, ids.shape[1] - last)
    cache = model(input_ids=ids[:, :first], use_cache=True, logits_to_keep=1).past_key_values
    if first == ids.shape[1]:
        return cache
    with asking():
        return model(input_ids=ids[:, first:], past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values


@torch.no_grad()
def generate_answer(model: Any, tokenizer: Any, prompt: Prompt, cache: Any) -> str:
    """What the model says, greedily, after a cache from `read_question`, which is written to.

    It stops as soon as every answer has been said: nothing that comes later can change the score.
    """
    ids = torch.tensor(prompt.ids, device=device_of(model))[None]

    def said(generated: Tensor) -> str:
        return tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)

    def complete(generated: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([string_match_all(said(generated), prompt.answers) == 1.0], device=generated.device)

    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=prompt.new_tokens,
        do_sample=False,
        num_beams=1,
        stopping_criteria=[complete],
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    return said(generated)


@torch.no_grad()
def answer_losses(model: nn.Module, prompt: Prompt, cache: Any) -> tuple[Tensor, Tensor]:
    """Losses of the right answer's tokens, float32 ``(n,)`` in nats, and whether each is the first choice, bool
    ``(n,)``, after a cache from `read_question`, which is written to.
    """
    rest = torch.tensor(prompt.answered[-prompt.answer_tokens - 1 :])
    logits = model(input_ids=rest[None].to(device_of(model)), past_key_values=cache, use_cache=True).logits
    predicted, answer = logits[0, :-1].float().cpu(), rest[1:]
    return nn.functional.cross_entropy(predicted, answer, reduction="none"), predicted.argmax(dim=-1) == answer
