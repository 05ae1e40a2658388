"""What methods of the field cost a model at equal pairs, without an adapter: excess perplexity over dense attention.

    python studies/opponents.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text novel.txt --text plays.txt \\
        --setting 2048:2:0.24 --setting 4096:1:0.14 --out opponents.json

Windows are those of `focus-hf eval --seq-len LENGTH --max-tokens LENGTH*WINDOWS`. Rows that are in the file already
are kept, so that it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from focus_hf.evaluate import SlidingWindows, token_losses
from focus_hf.evaluate.opponents import OPPONENTS, attend_by, make_selector
from focus_hf.evaluate.perplexity import paired_excess
from focus_hf.machine import measured_with
from focus_hf.texts import TextSource, first_tokens


def measure(
    model: Any, windows: SlidingWindows, dense: Tensor, name: str, share: float, count_scoring: bool
) -> dict[str, Any]:
    """A row: one opponent on one text at one length and share of pairs."""
    length, started = windows.windows.shape[1], time.perf_counter()
    selector = make_selector(name, model, windows.windows)
    with attend_by(model, selector, share, count_scoring=count_scoring) as counted:
        losses = token_losses(model, windows.windows, batch_size=1)
    excess, stderr = paired_excess(losses, dense, windows.scored)
    return {
        "excess_perplexity": math.expm1(excess),
        "excess": excess,
        "stderr": stderr,
        "perplexity": windows.perplexity(losses),
        "dense": windows.perplexity(dense),
        "pairs": counted.share,
        "scoring": asdict(selector.cost(length)),
        "seconds": time.perf_counter() - started,
    }


def setting(text: str) -> tuple[int, int, float]:
    """``LENGTH:WINDOWS:SHARE``."""
    length, windows, share = text.split(":")
    return int(length), int(windows), float(share)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--setting", action="append", required=True, type=setting, help="LENGTH:WINDOWS:SHARE")
    parser.add_argument("--opponents", default=",".join(OPPONENTS))
    parser.add_argument("--count-scoring", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    known = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    for length, count, share in given.setting:
        for path in given.text:
            ids = TextSource((path,)).load().token_ids(tokenizer)[: length * count]
            windows, dense = SlidingWindows.of(ids, length, length, first_tokens(tokenizer)), None
            for name in given.opponents.split(","):
                what = {
                    "text": Path(path).stem,
                    "length": length,
                    "windows": count,
                    "share": share,
                    "opponent": name,
                    "scoring_counted": given.count_scoring,
                }
                if any(what.items() <= row.items() for row in known):
                    continue
                if dense is None:
                    dense = token_losses(model, windows.windows, batch_size=1)
                row = what | measure(model, windows, dense, name, share, given.count_scoring)
                known.append(row)
                given.out.write_text(json.dumps({"measured_with": measured_with(), "rows": known}, indent=1) + "\n")
                print(
                    f"{row['text']:14} {length:5} {100 * row['pairs']:5.1f} %  {name:18} "
                    f"{100 * row['excess_perplexity']:+6.2f} %  {row['seconds']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
