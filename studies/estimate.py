"""What an estimate for unread cells brings: one mean key and mean value for each, counted as pairs.

    python -m studies.estimate --adapter adapters/smollm2-135m --text adapters/smollm2-135m/held_out/novel.txt \
        --length 4096 --pairs 0.05,0.08

Means are those before each block of 64 queries, in the place of what a query does not read: of each cell, of each
group's far keys, or of each band's unread keys, with the logarithm of how many they stand for added to their scores.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import focus_hf
from focus_hf.adapter import interface
from focus_hf.attention import Problem, attended_pairs
from focus_hf.attention.definition import bands_of, dense_pairs
from focus_hf.hub import load_adapted
from focus_hf.texts import tokenize_windows

BLOCK = 64
KINDS = ("none", "cell", "group", "band")


@dataclass
class Estimated:
    """Attention of a whole prompt with an estimate, and what it read, in pairs of all heads."""

    kind: str
    pairs: int = 0
    means: int = 0
    possible: int = 0

    def __call__(self, problem: Problem, **_: object) -> Tensor:
        outputs = [self.block(problem, first) for first in range(0, problem.num_queries, BLOCK)]
        return torch.cat(outputs, dim=2)

    def block(self, problem: Problem, first: int) -> Tensor:
        who, end = problem.who, min(first + BLOCK, problem.num_queries)
        rows, seen = slice(first, end), slice(0, end)
        key, value = problem.key[:, :, None, seen], problem.value[:, :, None, seen]
        query = problem.query[:, :, rows].unflatten(1, (key.shape[1], -1))  # (B, H_kv, r, R, D)
        read = attended_pairs(who, rows, seen)
        scores = (query @ key.mT * problem.scores.scale).masked_fill(~read[:, :, None], -torch.inf)
        self.pairs += int(read.sum()) * query.shape[2]
        self.possible += int(dense_pairs(who, rows, seen).sum()) * problem.query.shape[1]
        far = first - who.pattern.local_window
        if self.kind == "none" or far <= 0:
            return (scores.softmax(-1) @ value).flatten(1, 2)
        unread = ~who.reads[:, :, rows]  # (B, H_kv, R, K, bands)
        band = bands_of(first - torch.arange(far), who.pattern)
        cell = who.key_groups[:, :, :far].long() * unread.shape[-1] + band
        members = F.one_hot(cell, unread.shape[-1] * unread.shape[-2]).to(key.dtype).mT
        members = members.unflatten(2, unread.shape[-2:])  # (B, H_kv, K, bands, far)
        sizes = unread * members.sum(-1)[:, :, None]
        if self.kind == "group":
            members, sizes = members.sum(3, keepdim=True), sizes.sum(4, keepdim=True)
        shares = members / members.sum(-1, keepdim=True).clamp(min=1)
        if self.kind == "band":  # of each query's own unread keys
            sizes = sizes.sum(3)  # (B, H_kv, R, bands)
            own = (unread[..., None] * members[:, :, None]).sum(3) / sizes.clamp(min=1)[..., None]
            mean_key, mean_value = own @ key[:, :, :, :far], own @ value[:, :, :, :far]  # (B, H_kv, R, bands, D)
            others = torch.einsum("bhgrd,bhrnd->bhgrn", query, mean_key)
        else:
            shares, sizes = shares.flatten(2, 3), sizes.flatten(3)
            mean_key, mean_value = shares @ key[:, :, 0, :far], shares @ value[:, :, 0, :far]
            others = query @ mean_key[:, :, None].mT
        self.means += int((sizes > 0).sum()) * query.shape[2]
        weights = torch.cat([scores, others * problem.scores.scale + sizes.log()[:, :, None]], dim=-1).softmax(-1)
        of_keys, of_means = weights[..., :end], weights[..., end:]
        if self.kind == "band":
            return (of_keys @ value + torch.einsum("bhgrn,bhrnd->bhgrd", of_means, mean_value)).flatten(1, 2)
        return (of_keys @ value + of_means @ mean_value[:, :, None]).flatten(1, 2)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pairs", default="0.1", help="shares asked for, with commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base)
    ids = tokenize_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.length)[:1]

    def loss() -> float:
        return float(model(input_ids=ids, labels=ids).loss)

    model.disable_adapters()
    dense = loss()
    model.enable_adapters()
    for share in map(float, args.pairs.split(",")):
        focus_hf.set_routing(model, pairs=share, length=args.length)
        for kind in args.kinds.split(","):
            estimated = Estimated(kind)
            with mock.patch.object(interface, "focus_attention", estimated):
                excess = 100 * math.expm1(loss() - dense)
            read, means = (100 * count / estimated.possible for count in (estimated.pairs, estimated.means))
            print(f"{share} {kind}: {excess:+.2f} %, {read:.2f} % of the pairs, {means:.2f} % for means", flush=True)


if __name__ == "__main__":
    main()
