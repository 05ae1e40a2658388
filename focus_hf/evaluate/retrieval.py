"""A probe of long-range retrieval: does the model find what was said far back?

Random keys with their values are hidden in ordinary text; after it a key is repeated and the value asked for. Small
models rarely spell the value out, but even they predict it better when it was there, so beside exact answers the probe
measures the information gained: how many nats per token a value costs less than one that was never there.

A text is read once, and each of its needles asked for after a copy of its cache: reading is what takes the time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .modes import Mode, Row, attending, device_of, with_cache
from .quality import with_width


@dataclass(frozen=True, kw_only=True)
class RetrievalRow(Row):
    """One length and mode of the probe.

    Args:
        mode, top_k, width, budget: see `Mode`.
        length: tokens of each prompt with its answer.
        depth: the part of the text over which the needles stand, from its start: 0 to 1.
        gain: nats per value token by which it helped that the needle was there; 0 is nothing retrieved.
        exact: share of needles whose whole value was the model's first choice, token by token.
        loss: nats per value token with the needle.
        trials: needles.
    """

    length: int
    depth: float
    gain: float
    exact: float
    loss: float
    trials: int


@dataclass(frozen=True)
class Haystack:
    """A text with needles, and what is asked after it.

    Args:
        text: token ids ``(T,)``.
        present, absent: needles in it and as many others, each a key and its value: ``(n, key + value tokens)``.
        key_tokens: of each.
    """

    text: Tensor
    present: Tensor
    absent: Tensor
    key_tokens: int

    @classmethod
    def make(
        cls,
        ids: Tensor,
        length: int,
        needles: int,
        *,
        first: Sequence[int] = (),
        depth: float = 0.5,
        key_tokens: int = 8,
        value_tokens: int = 8,
        seed: int = 0,
    ) -> Haystack:
        """Hide needles in a text, evenly.

        Keys and values are random tokens of the text itself, so that any tokenizer and language will do.

        Args:
            ids: token ids ``(n,)`` of an ordinary text, the hay.
            length: tokens of text and question.
            needles: how many, each of ``key_tokens`` and ``value_tokens``.
            first: tokens that the prompt begins with, see `focus_hf.texts.first_tokens`.
            depth: the part of the text that they are in, from its start: 0 to 1.

        Raises:
            ValueError: the text or the length is too short.
        """
        each = key_tokens + value_tokens
        hay = length - len(first) - (needles + 1) * each
        if hay < needles + 1:
            raise ValueError(
                f"{needles} needles and a question of {each} tokens need {(needles + 1) * (each + 1)} tokens, got "
                f"length {length}."
            )
        if ids.numel() < hay:
            raise ValueError(f"The text has {ids.numel()} tokens, but a prompt of {length} needs {hay}.")
        generator = torch.Generator().manual_seed(seed)
        vocabulary = ids.unique()
        start = int(torch.randint(ids.numel() - hay + 1, (), generator=generator))
        chosen = vocabulary[torch.randint(vocabulary.numel(), (2 * needles, each), generator=generator)]
        present, absent = chosen.split(needles)
        cuts = [round(depth * hay * (place + 0.5) / needles) for place in range(needles)]
        stretches = ids[start : start + hay].tensor_split(cuts)
        parts = [stretches[0], *(part for pair in zip(present, stretches[1:], strict=True) for part in pair)]
        return cls(torch.cat([ids.new_tensor(list(first)), *parts]), present, absent, key_tokens)


#: Needles in one text, at most.
_TOGETHER = 16


@torch.no_grad()
def probe_retrieval(
    model: nn.Module,
    ids: Tensor,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    *,
    first: Sequence[int] = (),
    depth: float = 0.5,
    trials: int = 16,
    seed: int = 0,
) -> Iterator[RetrievalRow]:
    """Run the probe at growing lengths, one row at a time; every mode answers the same questions.

    Args:
        model: with an active Focus adapter.
        ids: token ids ``(n,)`` of an ordinary text.
        lengths: tokens of text and question.
        modes: see `list_modes`; soft attention is left out.
        first, depth: see `Haystack.make`; the seed is of its choices.
        trials: needles; up to 16 in one text, fewer in a short one.
    """
    for length in lengths:
        together = min(trials, _TOGETHER, max(1, length // 64))
        counts = [min(together, trials - asked) for asked in range(0, trials, together)]
        texts = [Haystack.make(ids, length, n, first=first, depth=depth, seed=seed + i) for i, n in enumerate(counts)]
        for mode in with_cache(modes):
            mode = with_width(model, mode, texts[0].text[None], length)
            with attending(model, mode, texts[0].text[None]):
                loss, exact, without = torch.cat([_ask(model, text) for text in texts]).mean(dim=0).tolist()
            found = {"gain": without - loss, "exact": exact, "loss": loss}
            yield RetrievalRow(**mode.columns, length=length, depth=depth, trials=trials, **found)


def _ask(model: Any, hay: Haystack) -> Tensor:
    """Of each needle the nats per value token, whether all are the likeliest, and the nats of one that is not there:
    float32 ``(n, 3)``.
    """
    device = device_of(model)
    read = model(input_ids=hay.text[None].to(device), use_cache=True, logits_to_keep=1).past_key_values

    def answer(needle: Tensor) -> tuple[float, float]:
        asked = needle[None].to(device)
        logits = model(input_ids=asked, past_key_values=copy.deepcopy(read), use_cache=True).logits[0]
        predicted, value = logits[hay.key_tokens - 1 : -1].float(), asked[0, hay.key_tokens :]
        return cross_entropy(predicted, value).item(), float((predicted.argmax(dim=-1) == value).all())

    pairs = zip(hay.present, hay.absent, strict=True)
    return torch.tensor([(*answer(present), answer(absent)[0]) for present, absent in pairs])
