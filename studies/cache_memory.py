"""What a KV cache takes under an adapter, beside a `DynamicCache` of the base model.

    python -m studies.cache_memory --adapter adapters/smollm2-135m --text adapters/smollm2-135m/held_out/novel.txt

A text is read into the cache under each budget, then tokens are decoded one by one. Bytes are those of all tensors
of the cache: keys, values, positions, groups, tables. With ``--check PATH`` the logits of the decoded tokens are
compared with those of another path, whose cache keeps everything in its order: ``lookup`` for routing per head, else
``masked``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from focus_hf import set_routing
from focus_hf.hub import load_adapted
from focus_hf.texts import tokenize_windows


def cache_bytes(past: Any) -> int:
    """Of all tensors that a cache holds."""
    total = 0
    for layer in past.layers:
        if (store := getattr(layer, "store", None)) is not None:
            total += store.num_bytes()
        else:
            known = getattr(layer, "group_memberships", None)
            total += layer.keys.nbytes + layer.values.nbytes + (0 if known is None else known.nbytes)
    return total


def plain_bytes(past: Any, tokens: int) -> int:
    """What keys and values of so many tokens take, one after the other."""
    total = 0
    for layer in past.layers:
        store = getattr(layer, "store", None)
        keys, values = (layer.keys, layer.values) if store is None else (store.recent.keys, store.recent.values)
        heads = keys.shape[0] * keys.shape[1]
        total += tokens * heads * (keys.shape[-1] + values.shape[-1]) * keys.element_size()
    return total


@torch.no_grad()
def decode(model: Any, ids: Tensor, new: int) -> tuple[Any, int, Tensor]:
    """The cache of ``ids (T,)``, its bytes before the last ``new`` tokens, and the logits of these."""
    past, logits = DynamicCache(config=model.config), []
    model(input_ids=ids[None, :-new], past_key_values=past, use_cache=True, logits_to_keep=1)
    taken = cache_bytes(past)
    for token in ids[-new:]:
        logits.append(model(input_ids=token[None, None], past_key_values=past, use_cache=True).logits[0, -1])
    return past, taken, torch.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096, help="tokens in the cache")
    parser.add_argument("--new", type=int, default=4, help="tokens that are then decoded")
    parser.add_argument("--pairs", nargs="*", default=[None], help="budgets of the adapter, instead of its own")
    parser.add_argument("--check", metavar="PATH", help="compare logits with those of this path")
    args = parser.parse_args()
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base)
    ids = tokenize_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.length + args.new)[0]
    for pairs in args.pairs:
        if pairs is not None:
            set_routing(model, pairs=float(pairs))
        past, taken, logits = decode(model, ids, args.new)
        plain = plain_bytes(past, args.length)
        found = {
            "pairs": pairs,
            "tokens": args.length,
            "MiB": taken / 2**20,
            "of plain keys and values": taken / plain,
        }
        if args.check is not None:
            set_routing(model, path=args.check)
            _, _, expected = decode(model, ids, args.new)
            set_routing(model, path="auto")
            found["largest difference of logits"] = float((logits - expected).abs().max())
            found["largest logit"] = float(expected.abs().max())
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
