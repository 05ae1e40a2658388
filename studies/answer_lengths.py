"""How long a chat model's greedy answers are with an adapter, and with dense attention.

    python -m studies.answer_lengths --adapter adapters/qwen2.5-coder-0.5b --base FOLDER --pairs 0.14 --length 4096 \\
        --text adapters/qwen2.5-coder-0.5b/held_out/rust.txt

Each prompt is a stretch of the text and a request for a summary of it. Sparse decoding was reported to lengthen
answers (arXiv 2601.03043): what it saves on a token it would lose on their number.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focus_hf.evaluate import Mode, attending
from focus_hf.hub import load_adapted

REQUEST = "{text}\n\n---\nSummarise the text above in a few sentences."


def make_prompts(tokenizer: Any, text: str, length: int, count: int) -> list[Tensor]:
    """Token ids ``(1, T)`` of ``count`` prompts of about ``length`` tokens, from stretches spread over a text.

    Raises:
        ValueError: the text is too short, or the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template: answers end where a chat model ends them.")
    ids = tokenizer(text, verbose=False).input_ids
    if len(ids) < count * length:
        raise ValueError(f"The text has {len(ids):,} tokens, {count} stretches of {length:,} were asked for.")
    prompts = []
    for number in range(count):
        start = number * ((len(ids) - length) // max(1, count - 1))
        stretch = tokenizer.decode(ids[start : start + length])
        chat = [{"role": "user", "content": REQUEST.format(text=stretch)}]
        prompts.append(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
                "input_ids"
            ]
        )
    return prompts


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: Tensor, mode: Mode, most: int) -> list[int]:
    """Tokens of the greedy answer, its end included if it comes within ``most``."""
    with attending(model, mode, prompt):
        generated = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=most,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=tokenizer.eos_token_id,
        )
    return generated[0, prompt.shape[1] :].tolist()


def same_until(one: list[int], other: list[int]) -> int:
    """Tokens at the start that two answers share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pairs", required=True, help="share of pairs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each stretch")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--most", type=int, default=400, help="tokens of an answer, at most")
    args = parser.parse_args()
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base, dtype="float32")
    modes = (Mode("dense"), Mode("hard", budget=args.pairs))
    found: list[tuple[int, int]] = []
    for prompt in make_prompts(tokenizer, args.text.read_text(encoding="utf-8"), args.length, args.prompts):
        dense, focus = (answer(model, tokenizer, prompt, mode, args.most) for mode in modes)
        found.append((len(dense), len(focus)))
        shown = f"dense {len(dense)}, Focus {len(focus)}, the same up to {same_until(dense, focus)}"
        print(f"{prompt.shape[1]:,} tokens: {shown}", flush=True)
    cut = tuple(sum(length[side] == args.most for length in found) for side in (0, 1))
    sums = tuple(sum(length[side] for length in found) for side in (0, 1))
    print(
        f"{len(found)} answers: dense {sums[0]:,} tokens, Focus {sums[1]:,} ({sums[1] / sums[0]:.2f}x); cut at "
        f"{args.most}: {cut[0]} and {cut[1]}"
    )


if __name__ == "__main__":
    main()
