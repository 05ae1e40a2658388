"""Tasks on code in every mode of attention: losses where far tokens decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..modes import OPPONENTS, Mode, attending, device_of
from ..perplexity import attended_share
from ..quality import focus_share, matched
from .completion import CompletionPrompt, make_completion_prompts
from .names import NamesPrompt, make_names_prompts

#: Edges of distances at which the second uses of names are counted together, in tokens: above one, up to the next.
DISTANCES = (0, 64, 256, 1024, 4096)

TASKS = ("names", "completion")


@dataclass(frozen=True)
class CodePlan:
    """What to ask.

    Args:
        lengths: tokens of each prompt.
        samples: prompts of each task and length.
        seed: of the prompts.
    """

    lengths: Sequence[int]
    samples: int = 10
    seed: int = 0


@dataclass(frozen=True)
class CodeRow:
    """One task at one length in one mode.

    Args:
        task: ``"names"`` or ``"completion"``.
        length: tokens of each prompt.
        mode, top_k, width, budget: see `QualityRow`.
        loss: of the tokens that are asked for, in nats per token.
        pairs: share of the possible pairs that routed layers attend to, on the first prompt; of an opponent on all.
        samples, seed: see `CodePlan`.
        exact: completion: share of prompts whose whole answer is the model's first choice, token by token: what it
            would say greedily.
        distance: completion: how far back the answer stands at least, in tokens.
        by_distance: names: for each stretch of `DISTANCES` that has any, ``above``, ``names`` and ``loss``.
    """

    task: str
    length: int
    mode: str
    top_k: int | None
    loss: float
    pairs: float
    samples: int
    seed: int
    width: int | None = None
    budget: str | None = None
    exact: float | None = None
    distance: int | None = None
    by_distance: list[dict[str, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"code: {self.task}, {self.length} tokens: {Mode(self.mode, self.top_k, self.width, self.budget)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_code(model: Any, tokenizer: Any, plan: CodePlan, modes: Sequence[Mode]) -> Iterator[CodeRow]:
    """Ask every mode the same: one row at a time, for each length, task and mode.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        tokenizer: of the model.
        plan: what to ask.
        modes: see `list_modes`.

    Raises:
        ValueError: there are not so many prompts of a length.
    """
    asked: list[tuple[str, int, Sequence[NamesPrompt] | Sequence[CompletionPrompt]]] = []
    for length in plan.lengths:
        asked.append(("names", length, make_names_prompts(tokenizer, length, plan.samples, plan.seed)))
        asked.append(("completion", length, make_completion_prompts(tokenizer, length, plan.samples, plan.seed)))
    for task, length, prompts in asked:
        first = prompts[0].ids[None]
        for mode in modes:
            if mode.name in OPPONENTS and mode.width is None:
                mode = matched(mode, focus_share(model, mode, first), length)
            with attending(model, mode, first) as counted:
                found = _names(model, prompts) if task == "names" else _completion(model, prompts)
                if counted is not None:
                    pairs = counted.share
                else:
                    pairs = 1.0 if mode.name in ("dense", "soft") else attended_share(model, first)
            how: dict[str, Any] = {"samples": plan.samples, "seed": plan.seed}
            how |= {"width": mode.width, "budget": mode.budget, "pairs": pairs}
            yield CodeRow(task, length, mode.name, mode.top_k, **found, **how)


def _names(model: nn.Module, prompts: Sequence[Any]) -> dict[str, Any]:
    """Loss of second uses, of all and by their distance."""
    sums: dict[int, list[float]] = {above: [] for above in DISTANCES}
    counts = dict.fromkeys(DISTANCES, 0)
    for prompt in prompts:
        losses, _ = losses_of(model, prompt.ids, [token for use in prompt.uses for token in use.tokens])
        for use, mine in zip(prompt.uses, losses.split([len(use.tokens) for use in prompt.uses]), strict=True):
            above = max(edge for edge in DISTANCES if edge < use.distance)
            sums[above] += mine.tolist()
            counts[above] += 1
    every = [loss for mine in sums.values() for loss in mine]
    stretches = [
        {"above": above, "names": counts[above], "loss": sum(mine) / len(mine)} for above, mine in sums.items() if mine
    ]
    return {"loss": sum(every) / len(every), "by_distance": stretches}


def _completion(model: nn.Module, prompts: Sequence[Any]) -> dict[str, Any]:
    """Loss of answers, and how many are the model's own."""
    every: list[float] = []
    exact = 0
    for prompt in prompts:
        length = len(prompt.ids)
        losses, first_choice = losses_of(model, prompt.ids, list(range(length - prompt.answer, length)))
        every += losses.tolist()
        exact += bool(first_choice.all())
    least = min(prompt.distance for prompt in prompts)
    return {"loss": sum(every) / len(every), "exact": exact / len(prompts), "distance": least}


@torch.no_grad()
def losses_of(model: Any, ids: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Losses of some tokens of a text, and whether each is the model's first choice.

    Args:
        model: a causal language model.
        ids: token ids ``(T,)``.
        places: of the tokens, none of them the first.

    Returns:
        Nats, float32 ``(n,)``, and bool ``(n,)``.
    """
    wanted = torch.tensor(places)
    device = device_of(model)
    # Logits of whole long texts can be larger than the model.
    logits = model(input_ids=ids[None].to(device), use_cache=False, logits_to_keep=(wanted - 1).to(device)).logits
    predicted, right = logits[0].float().cpu(), ids[wanted]
    return nn.functional.cross_entropy(predicted, right, reduction="none"), predicted.argmax(dim=-1) == right
