"""What becomes of every causal language model that the installed transformers knows, as a table.

    python -m studies.architectures                              # all families, about ten minutes of one core
    python -m studies.architectures llama gemma3_text            # some of them
    python -m studies.architectures --sliding                    # with include_sliding_layers=True
    python -m studies.architectures --write docs/architectures.md   # both ways

Ends with 1 if a family is wrong or is refused obscurely.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from focus_hf.escape import escape
from focus_hf.files import write_atomically

from .run import Found, by_type, examine_all
from .tiny import names
from .why import WHY

_HEAD = """# Architectures

Every causal language model that transformers knows, as a tiny model with random weights: routed and held to
all that must hold, or refused. Made by

    python -m studies.architectures --write docs/architectures.md

with transformers {transformers}, PEFT {peft}, torch {torch}. Of {types} model types, **{right} are right**,
{said} of them with a setting that the refusal of the default one names; {refused} are refused, {not_made} not made,
{bad} wrong or refused obscurely. By rows: {rows}; with `include_sliding_layers=True`: {sliding}.

A family is *right* if all of this holds: the adapter changes something; short contexts and a switched-off adapter
are the base model, bit for bit; no token sees later ones; logits are those of the base model's own eager attention
under an explicit mask; all ways to compute them agree; with all tokens in one group they are dense attention's;
decoding token by token, through each kind of cache, gives what one pass gives, and `generate` what the logits say;
`logits_to_keep` and left padding change nothing; saved and loaded by both stock loaders it is the same; all
centroids get gradients. What the base model itself does not do is not asked. BERT and its kin are made as decoders
(`is_decoder=True`). *Refused* means an error in one line when the adapter is added. *Not made* means that
transformers cannot make such a model alone, or not without another package. The column *sliding too* is the
result with `include_sliding_layers=True`, where that routes other layers.

{why}

## The table

Right, with all of their layers routed: {plain}.

| all others | result | routed layers | sliding too | |
|---|---|---:|---|---|
"""


def page(found: Found, sliding: Found) -> str:
    """The table as Markdown.

    Args:
        found: from `examine_all`.
        sliding: likewise, with ``include_sliding_layers=True``.
    """
    types = Counter(by_type(found).values())
    rows = [
        f"| {name} | {of['result']} | {_routed(of)} | {_other(of, sliding[name])} | {escape(of['detail'])} |"
        for name, of in found.items()
        if not _plain(of, sliding[name])
    ]
    head = _HEAD.format(
        transformers=transformers.__version__,
        peft=peft.__version__,
        torch=torch.__version__,
        types=types.total(),
        right=types["right"],
        said=types["right"] - Counter(by_type(found, default_only=True).values())["right"],
        refused=types["refused"],
        not_made=types["not made"],
        bad=types["wrong"] + types["obscure"],
        rows=_words(Counter(of["result"] for of in found.values())),
        sliding=_words(Counter(of["result"] for of in sliding.values())),
        why=WHY,
        plain=", ".join(name for name, of in found.items() if _plain(of, sliding[name])),
    )
    return head + "\n".join(rows) + "\n"


def _plain(of: dict[str, Any], sliding: dict[str, Any]) -> bool:
    """Right in both ways, with every layer routed: there is nothing to say about it."""
    whole = of["result"] == "right" and of["routed"] == of["layers"]
    return whole and not of["detail"] and not _other(of, sliding)


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {result}" for result, number in counts.most_common())


def _other(of: dict[str, Any], sliding: dict[str, Any]) -> str:
    """The result with sliding layers, where that is another."""
    same = sliding["result"] == of["result"] and sliding.get("routed") == of.get("routed")
    return "" if same else f"{sliding['result']} {_routed(sliding)}".strip()


def _routed(of: dict[str, Any]) -> str:
    return f"{of['routed']} of {of['layers'] or '?'}" if "routed" in of else ""


def _lines(path: Path | None) -> Found:
    """What a run printed, by name."""
    if path is None:
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"family"')]
    return {line.pop("family"): line for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--sliding", action="store_true", help="with include_sliding_layers=True")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table, of both ways")
    parser.add_argument("--jobs", type=int, default=1, help="families examined at once")
    parser.add_argument("--resume", type=Path, help="what an interrupted run printed: its families are not run again")
    options = parser.parse_args()
    if options.write and options.sliding:
        parser.error("--write examines both ways: leave --sliding out.")
    families = options.families or names()
    runs = [] if options.sliding else [examine_all(families, _lines(options.resume), jobs=options.jobs)]
    if options.sliding or options.write:
        default = runs[0] if runs else None
        runs.append(examine_all(families, default=default, jobs=options.jobs, include_sliding_layers=True))
    counts = Counter(of["result"] for found in runs for of in found.values())
    print(dict(counts))
    if options.write:
        write_atomically(options.write, page(*runs).encode())
    sys.exit(1 if counts["wrong"] + counts["obscure"] else 0)


if __name__ == "__main__":
    main()
