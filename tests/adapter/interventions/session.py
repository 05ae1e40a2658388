"""A model and the truth, side by side: the same tokens, and the same done to their caches, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache

from tests.adapter.interventions.reference import Kept, Reference
from tests.families import VOCABULARY

#: How far logits may be from the truth.
RTOL, ATOL = 1e-3, 3e-4


class Wrong(AssertionError):
    """Logits are not what the definition says."""


class NotApplicable(Exception):
    """The library itself does not do this, with the base model and its own cache."""


class Session:
    """One conversation with a model.

    Args:
        model: with its adapters, in eval mode.
        reference: the truth of it.
        chance: draws tokens.
        batch: sequences.
        padding: of the first sequence, at its left.
        with_mask: hand a mask over also where nothing is padding.

    Attributes:
        past: the model's cache.
        kept: the reference's.
        adapter: the adapter in force, ``None`` for the base model.
        log: what was done, to be read.
    """

    def __init__(
        self,
        model: PeftModel,
        reference: Reference,
        chance: random.Random,
        batch: int = 1,
        padding: int = 0,
        with_mask: bool = False,
    ) -> None:
        self.model, self.reference, self.chance = model, reference, chance
        self.past: Any = DynamicCache(config=model.config)
        self.kept = Kept.empty(reference.model)
        self.adapter: str | None = "default"
        self.valid = torch.zeros(batch, 0, dtype=torch.bool)
        self.padding, self.with_mask = padding, with_mask or padding > 0
        self.log: list[str] = []

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return int(self.valid.shape[1])

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.valid.shape[0])

    def tokens(self, count: int) -> Tensor:
        """Random tokens, int64 ``(B, count)``; others for each adapter, so that no key is found twice."""
        first, last = {"default": (2, 60), "other": (60, 80), None: (80, VOCABULARY)}[self.adapter]
        drawn = [[self.chance.randrange(first, last) for _ in range(count)] for _ in range(self.batch)]
        return torch.tensor(drawn)

    def call(self, count: int, how: AbstractContextManager[Any] | None = None, tolerance: float = 1.0) -> None:
        """Let model and truth go on by so many random tokens.

        Args:
            count: of each sequence.
            how: entered around the model's call.
            tolerance: factor on `RTOL` and `ATOL`.

        Raises:
            Wrong: the logits differ.
        """
        ids, before = self.tokens(count), self.length
        new = torch.ones_like(ids, dtype=torch.bool)
        if before == 0:
            new[0, : min(self.padding, count - 1)] = False
        self.valid = torch.cat([self.valid, new], dim=1)
        found = self.judged(ids, how)
        mask, positions = self._mask_and_positions(count)
        with torch.no_grad():
            expected = self.reference(ids, self.kept, self.adapter, mask, positions)
        self.log.append(f"{count} tokens, {self.length} in all")
        compare(found[new], expected[new], ", ".join(self.log), tolerance)

    def judged(self, ids: Tensor, how: AbstractContextManager[Any] | None = None) -> Tensor:
        """The model's logits for new tokens, which are the last of ``valid``."""
        mask, positions = self._mask_and_positions(ids.shape[1])
        off = self.model.disable_adapter() if self.adapter is None else nullcontext()
        with torch.no_grad(), how or nullcontext(), off:
            more = {"attention_mask": mask, "position_ids": positions}
            output = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, **more)
        return output.logits.clone()

    def _mask_and_positions(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        if not self.with_mask:
            return None, None
        return self.valid.long(), (self.valid.cumsum(dim=-1) - 1).clamp(min=0)[:, -count:]

    def fresh(self, count: int) -> None:
        """Another conversation with the same model, which must not know of this one."""
        other = Session(self.model, self.reference, self.chance)
        other.adapter, other.log = self.adapter, [*self.log, "another conversation"]
        other.valid = other.valid[:1]
        other.call(count)
        other.call(1)

    def change_caches(self, what: str, change: Callable[[Any], Any]) -> None:
        """Do the same to all caches, first to the reference's, which are the library's own.

        Raises:
            NotApplicable: the library's own cache refuses.
        """
        self.log.append(what)
        try:
            self.kept.both(change)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotApplicable(f"{what}: {error}") from None
        change(self.past)


def compare(found: Tensor, expected: Tensor, what: str, tolerance: float = 1.0) -> None:
    """Raise `Wrong` where logits are further from the truth than rounding takes them."""
    off = (found.double() - expected.double()).abs() - RTOL * tolerance * expected.double().abs()
    if not bool((off <= ATOL * tolerance).all()):
        raise Wrong(f"{what}: off by {float(off.max()):.3g}")
