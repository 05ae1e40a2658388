"""Where a needle is lost: RULER's text and question, each read by dense attention, by an adapter or by an oracle.

    python -m studies.needle_parts --adapter adapters/smollm2-135m --pairs 0.1 --length 8192 --samples 10

For each prompt the log-probability of the right answer, nats per token, and how many of its tokens are not the first
choice. The last `QUESTION` tokens before the answer are the question. The oracle reads, of every query head, the keys
with most of dense attention's own weight, as large a share of them for each token as is asked for (``--share``).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from focus_hf import set_routing
from focus_hf.evaluate.ruler.prompts import Prompt, make_prompts
from focus_hf.hub import load_adapted

#: Tokens between the text and the answer.
QUESTION = 48

#: Who reads the text, and who reads the question.
WAYS = (("dense", "dense"), ("dense", "oracle"), ("dense", "Focus"), ("Focus", "dense"), ("Focus", "Focus"))


def oracle(share: float) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of a few new tokens after a cache without padding."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        repeat = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(repeat, 1).transpose(-1, -2) * scaling
        new, length = scores.shape[-2:]
        later = torch.arange(length) > torch.arange(length - new, length)[:, None]
        scores = scores.masked_fill(later, float("-inf"))
        least = scores.topk(int(share * length), dim=-1).values[..., -1:]
        weights = scores.masked_fill(scores < least, float("-inf")).softmax(dim=-1)
        return (weights @ value.repeat_interleave(repeat, 1)).transpose(1, 2).contiguous(), None

    return attend


@torch.no_grad()
def read(model: Any, ids: list[int], cache: Any = None, logits: int = 0) -> Any:
    """The model's output for some tokens after a cache, which is not written to; all logits or the last ones."""
    past = copy.deepcopy(cache)
    return model(input_ids=torch.tensor(ids)[None], past_key_values=past, use_cache=True, logits_to_keep=logits)


def loss(model: Any, prompt: Prompt, cache: Any) -> tuple[float, int]:
    """Mean log-probability of the answer's tokens, and how many are not the first choice."""
    count = prompt.answer_tokens
    logits = read(model, prompt.answered[-count - QUESTION :], cache).logits[0, -count - 1 : -1].float()
    answer = torch.tensor(prompt.answered[-count:])
    return -F.cross_entropy(logits, answer).item(), int((logits.argmax(dim=-1) != answer).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--pairs", type=float, help="budget of the adapter")
    parser.add_argument("--share", type=float, default=0.105, help="of the keys, for the oracle")
    parser.add_argument("--task", default="niah_single_1")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=10)
    args = parser.parse_args()
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base)
    set_routing(model, pairs=args.pairs)
    base = AutoModelForCausalLM.from_pretrained(model.name_or_path).to(model.dtype).eval()
    AttentionInterface.register("oracle", oracle(args.share))
    AttentionMaskInterface.register("oracle", sdpa_mask)
    base.set_attn_implementation("oracle")
    # A prompt that an adapter continues after dense attention must know the groups of its text: a dense stretch does.
    dense_below = model.peft_config["default"].dense_below
    sums = dict.fromkeys(WAYS, 0.0)
    for number, prompt in enumerate(make_prompts(tokenizer, args.task, args.length, args.samples)):
        text = prompt.answered[: -prompt.answer_tokens - QUESTION]
        found = {}
        for reader in ("dense", "Focus"):
            set_routing(model, dense_below=len(text) if reader == "dense" else dense_below)
            cache = read(model, text, logits=1).past_key_values
            set_routing(model, dense_below=dense_below)
            found[reader, "Focus"] = loss(model, prompt, cache)
            set_routing(model, dense_below=args.length)
            found[reader, "dense"] = loss(model, prompt, cache)
            if reader == "dense":
                found["dense", "oracle"] = loss(base, prompt, cache)
        for way in WAYS:
            sums[way] += found[way][0]
        shown = ", ".join(f"{'/'.join(way)} {found[way][0]:.3f} ({found[way][1]})" for way in WAYS)
        print(f"{number}: {shown}", flush=True)
    for way, total in sums.items():
        print(f"text {way[0]}, question {way[1]}: {total / args.samples:.3f}")


if __name__ == "__main__":
    main()
