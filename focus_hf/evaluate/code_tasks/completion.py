"""Repository-level completion: a line whose answer stands in another file, far back.

A prompt is files one after the other: first a function of the standard library with what stands around it, then
other modules, last a file that defines a function of the same name with the same parameters, up to its opening
bracket. What is asked for is the rest of that line: the parameters as they stand in the first file, and nowhere
else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from os.path import commonprefix
from typing import Any, NamedTuple

import torch

from .sources import CodePrompt, Copy, Source, prompts_of

#: Lines around a function that are shown with it.
_BEFORE, _AFTER = 10, 20

#: Parameters that a function has at least, and characters of an answer at most.
_PARAMETERS, _LONGEST = 3, 90


class Function(NamedTuple):
    """A function: its name, the rest of its line after the bracket, the lines up to that one, and those after it."""

    name: str
    parameters: str
    shown: str
    after: str


def functions(source: Source) -> Iterator[Function]:
    """Top-level functions of a module whose definition is one line with several parameters."""
    lines = source.text.splitlines(keepends=True)
    for node in ast.parse(source.text).body:
        if not isinstance(node, ast.FunctionDef) or len(node.args.args) < _PARAMETERS or node.name.startswith("_"):
            continue
        line = lines[node.lineno - 1]
        start = f"def {node.name}("
        if not line.startswith(start) or not line.rstrip().endswith("):"):
            continue
        parameters = line[len(start) :].rstrip()
        if len(parameters) <= _LONGEST and source.text.count(parameters) == 1:
            shown = "".join(lines[max(0, node.lineno - 1 - _BEFORE) : node.lineno])
            yield Function(node.name, parameters, shown, "".join(lines[node.lineno : node.lineno + _AFTER]))


def make_completion_prompts(tokenizer: Any, length: int, samples: int, seed: int = 0) -> list[CodePrompt]:
    """Prompts of exactly so many tokens, each about a function of another module; the last tokens are the answer.

    An answer's distance is that of its first token from the last token of the line that has it.

    Raises:
        ValueError: nothing fits into so few tokens, or there are not so many functions.
    """
    prompts = prompts_of(f"{seed} completion {length}", samples, partial(_prompt, tokenizer, length))
    if len(prompts) < samples:
        raise ValueError(
            f"Code completion made {len(prompts)} prompts of {length} tokens, {samples} were asked for. Ask for fewer "
            "or longer ones."
        )
    return prompts


def _prompt(tokenizer: Any, length: int, modules: list[Source]) -> CodePrompt | None:
    """One about a function of the first module, filled up with the others; ``None`` if it cannot be made."""
    source, *others = modules
    function = next(functions(source), None)
    if function is None:
        return None

    def ids(text: str, special: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

    head = ids(f"# File: {source.name}.py\n{function.shown}", special=True)
    after = ids(function.after)
    question = (
        f"\n\n# File: my_{source.name}.py\nimport {source.name}\n\n\n"
        f"# The same parameters as {source.name}.{function.name}, see {source.name}.py.\ndef {function.name}("
    )
    asked, answered = ids(question), ids(question + function.parameters)
    answer = len(answered) - len(commonprefix([asked, answered]))
    room = length - len(head) - len(after) - len(answered)
    if room < 0:
        return None
    filler: list[int] = []
    for other in others:
        if len(filler) >= room:
            break
        if function.parameters not in other.text and not re.search(rf"\b{function.name}\b", other.text):
            filler += ids(f"\n\n# File: {other.name}.py\n{other.text}")
    if len(filler) < room:
        return None
    whole = [*head, *after, *filler[:room], *answered]
    places = tuple(range(length - answer, length))
    return CodePrompt(torch.tensor(whole), (Copy(places, length - answer - len(head)),))
