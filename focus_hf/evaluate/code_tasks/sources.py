"""Python code that is on every machine: the modules of the standard library."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Source:
    """A module's name and its text."""

    name: str
    text: str


@functools.cache
def standard_library() -> tuple[Source, ...]:
    """Its modules that are one file, by name; what they say differs between versions of Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return tuple(Source(file.stem, file.read_text(encoding="utf-8")) for file in files)


def shuffled(seed: str) -> list[Source]:
    """Its modules in an order that the seed alone decides."""
    modules = list(standard_library())
    Random(seed).shuffle(modules)
    return modules
