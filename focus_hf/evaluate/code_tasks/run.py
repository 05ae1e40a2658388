"""Tasks on code in every mode of attention: losses where far tokens decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..modes import Mode, Row, attending, device_of
from ..quality import shares_read, with_width
from .completion import make_completion_prompts
from .names import make_names_prompts
from .sources import CodePrompt

#: Edges of distances at which the second uses of names are counted together, in tokens: above one, up to the next.
DISTANCES = (0, 64, 256, 1024, 4096)

#: By its name, what makes the prompts of a task.
TASKS = {"names": make_names_prompts, "completion": make_completion_prompts}


@dataclass(frozen=True)
class CodePlan:
    """What to ask: ``samples`` prompts of each task at each of some lengths in tokens; the seed is theirs."""

    lengths: Sequence[int]
    samples: int = 10
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CodeRow(Row):
    """One task at one length in one mode.

    Args:
        task: ``"names"`` or ``"completion"``.
        length: tokens of each prompt.
        mode, top_k, width, budget: see `Mode`.
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
    loss: float
    pairs: float
    samples: int
    seed: int
    exact: float | None = None
    distance: int | None = None
    by_distance: list[dict[str, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"code: {self.task}, {self.length} tokens: {super().__str__()}"


def measure_code(model: Any, tokenizer: Any, plan: CodePlan, modes: Sequence[Mode]) -> Iterator[CodeRow]:
    """Ask every mode the same: one row at a time, for each length, task and mode.

    Args:
        model, tokenizer: with an active Focus adapter; it keeps its own settings.
        plan: what to ask.
        modes: see `list_modes`.

    Raises:
        ValueError: there are not so many prompts of a length.
    """
    kinds = [(task, length) for length in plan.lengths for task in TASKS]
    made = [TASKS[task](tokenizer, length, plan.samples, plan.seed) for task, length in kinds]
    for (task, length), prompts in zip(kinds, made, strict=True):
        first = prompts[0].ids[None]
        for mode in modes:
            mode = with_width(model, mode, first, length)
            with attending(model, mode, first) as counted:
                found = _measured(model, task, prompts)
                pairs, _ = shares_read(model, mode, counted, first)
            found |= {"pairs": pairs, "samples": plan.samples, "seed": plan.seed}
            yield CodeRow(**mode.columns, task=task, length=length, **found)


def _measured(model: Any, task: str, prompts: Sequence[CodePrompt]) -> dict[str, Any]:
    """Loss of all that is asked for; of names by their distance, of answers how many are the model's own."""
    losses: dict[int, list[Tensor]] = {above: [] for above in DISTANCES}
    exact = 0
    for prompt in prompts:
        found, first_choice = losses_of(model, prompt.ids, [token for one in prompt.asked for token in one.tokens])
        for one, mine in zip(prompt.asked, found.split([len(one.tokens) for one in prompt.asked]), strict=True):
            losses[max(edge for edge in DISTANCES if edge < one.distance)].append(mine)
        exact += bool(first_choice.all())
    loss = _mean([one for mine in losses.values() for one in mine])
    if task == "completion":
        least = min(prompt.asked[0].distance for prompt in prompts)
        return {"loss": loss, "exact": exact / len(prompts), "distance": least}
    stretches = [{"above": above, "names": len(mine), "loss": _mean(mine)} for above, mine in losses.items() if mine]
    return {"loss": loss, "by_distance": stretches}


def _mean(losses: list[Tensor]) -> float:
    return torch.cat(losses).double().mean().item()


@torch.no_grad()
def losses_of(model: Any, ids: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Losses of tokens at some places of a text ``(T,)``, none of them the first, and whether each is the model's
    first choice: nats, float32 ``(n,)``, and bool ``(n,)``.
    """
    wanted = torch.tensor(places)
    device = device_of(model)
    # Logits of whole long texts can be larger than the model.
    logits = model(input_ids=ids[None].to(device), use_cache=False, logits_to_keep=(wanted - 1).to(device)).logits
    predicted, right = logits[0].float().cpu(), ids[wanted]
    return nn.functional.cross_entropy(predicted, right, reduction="none"), predicted.argmax(dim=-1) == right
