"""Python code that is on every machine, the modules of the standard library, and what is asked of it."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A module's name and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Copy:
    """Tokens that repeat what stood before, as places in the text, and how far back that is, in tokens."""

    tokens: tuple[int, ...]
    distance: int


@dataclass(frozen=True)
class CodePrompt:
    """Token ids of code, ``(T,)``, and what of it is asked for."""

    ids: Tensor
    asked: tuple[Copy, ...]


@functools.cache
def standard_library() -> tuple[Source, ...]:
    """Its modules that are one file, by name; what they say differs between versions of Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return tuple(Source(file.stem, file.read_text(encoding="utf-8")) for file in files)


def prompts_of(seed: str, samples: int, make: Callable[[list[Source]], CodePrompt | None]) -> list[CodePrompt]:
    """The first prompts that can be made, at most ``samples``, of all modules, each with another one first; the seed
    alone decides their order.
    """
    modules = list(standard_library())
    Random(seed).shuffle(modules)
    made = (make(modules[place:] + modules[:place]) for place in range(len(modules)))
    return list(islice((prompt for prompt in made if prompt is not None), samples))
