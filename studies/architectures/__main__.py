"""What becomes of every causal language model that the installed transformers knows, as a table.

    python -m studies.architectures                              # all families, about ten minutes of one core
    python -m studies.architectures llama gemma3_text            # some of them
    python -m studies.architectures --sliding                    # with include_sliding_layers=True
    python -m studies.architectures --write docs/architectures.md

Ends with 1 if a family is wrong or is refused obscurely.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from focus_hf.escape import escape
from focus_hf.files import write_atomically

from .run import examine_all
from .tiny import names

_HEAD = """# Architectures

Every causal language model that transformers knows, as a tiny model with random weights: routed and held to
all that must hold, or refused. Made by

    python -m studies.architectures --write docs/architectures.md

with transformers {transformers}, PEFT {peft}, torch {torch}: {counts}.

A family is *right* if all of this holds: the adapter changes something; short contexts and a switched-off adapter
are the base model, bit for bit; no token sees later ones; logits are those of the base model's own eager attention
under an explicit mask; all ways to compute them agree; with all tokens in one group they are dense attention's;
decoding token by token, through each kind of cache, gives what one pass gives, and `generate` what the logits say;
`logits_to_keep` and left padding change nothing; saved and loaded by both stock loaders it is the same; all
centroids get gradients. What the base model itself does not do is not asked. BERT and its kin are made as decoders
(`is_decoder=True`). *Refused* means an error in one line when the adapter is added. *Not made* means that
transformers cannot make such a model alone, or not without another package.

| model type | result | routed layers | |
|---|---|---:|---|
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown."""
    counts = Counter(of["result"] for of in found.values())
    words = ", ".join(f"{number} {result}" for result, number in counts.most_common())
    versions = {"transformers": transformers.__version__, "peft": peft.__version__, "torch": torch.__version__}
    rows = [f"| {family} | {of['result']} | {_routed(of)} | {escape(of['detail'])} |" for family, of in found.items()]
    return _HEAD.format(counts=words, **versions) + "\n".join(rows) + "\n"


def _routed(of: dict[str, Any]) -> str:
    return f"{of['routed']} of {of['layers'] or '?'}" if "routed" in of else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--sliding", action="store_true", help="with include_sliding_layers=True")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    found = examine_all(options.families or names(), include_sliding_layers=options.sliding)
    counts = Counter(of["result"] for of in found.values())
    print(dict(counts))
    if options.write:
        write_atomically(options.write, page(found).encode())
    sys.exit(1 if counts["wrong"] + counts["obscure"] else 0)


if __name__ == "__main__":
    main()
