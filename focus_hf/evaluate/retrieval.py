"""A probe of long-range retrieval: does the model find what was said far back?

A random key and its value are hidden in ordinary text; at the end the key is repeated and the value asked for. Small
models rarely spell the value out, but even they predict it better when it was there, so beside exact answers the probe
measures the information gained: how many nats per token the value costs less with the needle than without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .modes import OPPONENTS, Mode, attending, device_of
from .perplexity import token_losses
from .quality import focus_share, matched


@dataclass(frozen=True)
class RetrievalRow:
    """One length and mode of the probe.

    Args:
        mode, top_k, width, budget: see `QualityRow`.
        length: tokens of each prompt with its answer.
        depth: where the needle was, 0 (start) to 1 (end).
        gain: nats per value token by which the needle helped; 0 is nothing retrieved.
        exact: share of prompts whose whole value was the model's first choice, token by token.
        loss: nats per value token with the needle.
        trials: prompts.
    """

    mode: str
    top_k: int | None
    length: int
    depth: float
    gain: float
    exact: float
    loss: float
    trials: int
    width: int | None = None
    budget: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Probe:
    """Prompts ``(trials, length)`` that end in a key and its value, with and without the needle before."""

    present: Tensor
    absent: Tensor
    value_tokens: int

    @classmethod
    def make(
        cls,
        ids: Tensor,
        length: int,
        depth: float,
        trials: int,
        *,
        key_tokens: int = 8,
        value_tokens: int = 8,
        seed: int = 0,
    ) -> Probe:
        """Hide needles in a text.

        Keys and values are random tokens of the text itself, so that any tokenizer and language will do.

        Args:
            ids: token ids ``(n,)`` of an ordinary text, the hay.
            length: tokens of each prompt.
            depth: where the needle goes, 0 to 1.
            trials: prompts.
            key_tokens, value_tokens: of each needle.
            seed: of the choices.

        Raises:
            ValueError: the text or the prompts are too short.
        """
        needle = key_tokens + value_tokens
        if length < 2 * needle + 2:
            raise ValueError(f"A retrieval prompt needs at least {2 * needle + 2} tokens, got length {length}.")
        hay = length - 2 * needle
        if ids.numel() < hay:
            raise ValueError(f"The text has {ids.numel()} tokens, but a prompt of {length} needs {hay}.")
        generator = torch.Generator().manual_seed(seed)
        vocabulary = ids.unique()
        present, absent = [], []
        for _ in range(trials):
            start = int(torch.randint(ids.numel() - hay + 1, (), generator=generator))
            text = ids[start : start + hay]
            chosen = vocabulary[torch.randint(vocabulary.numel(), (2 * needle,), generator=generator)]
            pair, other = chosen[:needle], chosen[needle:]
            cut = round(depth * hay)
            present.append(torch.cat([text[:cut], pair, text[cut:], pair]))
            absent.append(torch.cat([text[:cut], other, text[cut:], pair]))
        return cls(torch.stack(present), torch.stack(absent), value_tokens)


@torch.no_grad()
def probe_retrieval(
    model: nn.Module,
    ids: Tensor,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    *,
    depth: float = 0.1,
    trials: int = 16,
    batch_size: int = 4,
    seed: int = 0,
) -> list[RetrievalRow]:
    """Run the probe at growing lengths; every mode answers the same prompts.

    Args:
        model: with an active Focus adapter.
        ids: token ids ``(n,)`` of an ordinary text.
        lengths: tokens per prompt.
        modes: see `list_modes`.
        depth, trials, seed: see `Probe.make`.
        batch_size: prompts at a time.
    """
    rows = []
    for length in lengths:
        probe = Probe.make(ids, length, depth, trials, seed=seed)
        for mode in modes:
            if mode.name in OPPONENTS and mode.width is None:
                mode = matched(mode, focus_share(model, mode, probe.present), length)
            with attending(model, mode, probe.present):
                with_needle = token_losses(model, probe.present, batch_size)[:, -probe.value_tokens :]
                without = token_losses(model, probe.absent, batch_size)[:, -probe.value_tokens :]
                exact = _exact(model, probe, batch_size)
            loss = with_needle.mean().item()
            gain = without.mean().item() - loss
            found = (length, depth, gain, exact, loss, trials)
            rows.append(RetrievalRow(mode.name, mode.top_k, *found, mode.width, mode.budget))
    return rows


def _exact(model: nn.Module, probe: Probe, batch_size: int) -> float:
    """Share of prompts whose every value token is the most likely one."""
    right = 0
    for batch in probe.present.split(batch_size):
        logits = model(input_ids=batch.to(device_of(model)), use_cache=False).logits
        guesses = logits[:, -probe.value_tokens - 1 : -1].argmax(dim=-1).cpu()
        right += int((guesses == batch[:, -probe.value_tokens :]).all(dim=-1).sum())
    return right / probe.present.shape[0]
