"""How many keys consecutive tokens read together: what a tile of the prompt kernel computes (`predictions/work.py`).

    python -m studies.tile_unions --model HuggingFaceTB/SmolLM2-135M-Instruct --text novel.txt

Queries and keys are a model's on text. Keys are grouped by k-means before rotary positions, a group at a distance is
judged by its mean score in this very context, which no router is given, and one threshold over all heads and queries
leaves the share of pairs that is asked for. Blocks of 64 keys show what skipping whole blocks would save, in the order
of positions and in the order of groups.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WINDOW, SINKS, BANDS = 128, 4, 6

#: Tokens that are looked at, from each of these on.
SPAN, STARTS = 256, (3072, 5120, 7168, 7680)


def captured(model_id: str, text: str, layers: list[int], length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rotated queries, rotated keys, and keys before that, of some layers, ``(H, S, D)`` each."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama import modeling_llama

    found, plain, rotate = [], [], modeling_llama.apply_rotary_pos_emb

    def keep_plain(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain[:] = [key[0]]
        return rotate(query, key, *args, **kwargs)

    def keep(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in layers:
            found.append((query[0], key[0], plain[0]))
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register("captured", keep)
    modeling_llama.apply_rotary_pos_emb = keep_plain
    model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32, attn_implementation="captured")
    model.model(AutoTokenizer.from_pretrained(model_id)(text, return_tensors="pt").input_ids[:, :length])
    return found


def groups_of(keys: Tensor, number: int) -> Tensor:
    """k-means of keys, twelve rounds."""
    centers = keys[torch.randperm(len(keys))[:number]]
    for _ in range(13):
        group = (2 * keys @ centers.T - centers.square().sum(1)).argmax(1)
        sums = torch.zeros_like(centers).index_add_(0, group, keys)
        sizes = torch.bincount(group, minlength=number)[:, None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)
    return group


def judged(query: Tensor, key: Tensor, group: Tensor, rows: Tensor, number: int) -> tuple[Tensor, ...]:
    """Of queries: log share of a cell for each of its keys, keys of cells, cell of each key, who is far and near."""
    scores = query[:, rows] @ key.T * key.shape[1] ** -0.5
    distance = rows[:, None] - torch.arange(len(key))
    cell = group * BANDS + torch.bucketize(distance, torch.tensor([WINDOW << band for band in range(1, BANDS)]))
    far = (distance > WINDOW) & (torch.arange(len(key)) >= SINKS)
    near = ~far & (distance >= 0)
    sizes = torch.zeros(len(rows), number * BANDS).scatter_add_(1, cell, far.float())
    sums = torch.zeros(len(query), *sizes.shape).scatter_add_(2, cell.expand_as(scores), scores * far)
    cells = torch.where(sizes > 0, sums / sizes.clamp(min=1) + sizes.clamp(min=1).log(), -1e9)
    total = torch.logaddexp(cells.logsumexp(-1), scores.masked_fill(~near, -1e9).logsumexp(-1))
    share = (cells - total[..., None]).exp().mean(0).log() - sizes.clamp(min=1).log()
    return torch.where(sizes > 0, share, -1e9), sizes, cell.short(), far, near


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Llama")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--layers", default="4,8,12,17,20,24")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--shares", default="0.10,0.16")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    calls = []
    layers = [int(layer) for layer in chosen.layers.split(",")]
    for query, key, plain in captured(chosen.model, chosen.text.read_text(), layers, chosen.length):
        each = len(query) // len(key)
        for head in range(len(key)):
            group = groups_of(plain[head], chosen.groups)
            for start in STARTS:
                rows = torch.arange(start, start + SPAN)
                heads = query[head * each : head * each + each]
                calls.append((group, *judged(heads, key[head], group, rows, chosen.groups)))
    shares, sizes = (torch.cat([call[i].flatten() for call in calls]) for i in (1, 2))
    order = shares.argsort(descending=True)
    read = sizes[order].cumsum(0)
    near = sum(float(call[5].sum()) for call in calls)
    possible = near + sum(float(call[4].sum()) for call in calls)
    print("| pairs read | tokens | together | 64-key blocks, by position | by group |\n|---|---|---|---|---|")
    for share in map(float, chosen.shares.split(",")):
        threshold = shares[order[int((read < share * possible - near).sum())]]
        for tokens in (1, 8, 16, 32, 64):
            found = torch.zeros(3)
            for group, judgement, _, cell, far, close in calls:
                pairs = ((judgement > threshold).gather(1, cell.long()) & far) | close
                some = pairs.view(-1, tokens, pairs.shape[1]).any(1)
                by_group = some[:, group.argsort(stable=True)]
                found[0] += tokens * some.sum()
                found[1] += tokens * 64 * some.unflatten(1, (-1, 64)).any(-1).sum()
                found[2] += tokens * 64 * by_group.unflatten(1, (-1, 64)).any(-1).sum()
            print(f"| {share:.0%} | {tokens} | " + " | ".join(f"{x:.1%}" for x in found / possible) + " |", flush=True)


if __name__ == "__main__":
    main()
