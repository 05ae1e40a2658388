"""What share of a cache's pages a decoded token reads, on text, and how many of them a smaller device would lack.

    python -m studies.paging --adapter adapters/smollm2-135m --text adapters/smollm2-135m/held_out/*.txt

One forward of each text says which groups every token belongs to and reads. From that follows what decoding its second
half token by token would read of a cache stored by groups (`focus_hf.attention.store`), and what a device with room
for a part of the pages would have to fetch: the books are those of the cache itself (`DevicePages`).

Sinks and window are on the device anyway and are not counted; nor is the slack behind the window. *New* are pages that
the step before did not read. *Shuffled* is the control: the same reads with the steps in random order, so that
whatever consecutive tokens have in common is gone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from focus_hf.adapter import HeadView, observe_routing
from focus_hf.attention import DevicePages
from focus_hf.files import write_atomically
from focus_hf.hub import load_adapted
from focus_hf.texts import tokenize_windows

#: Room on the device for each layer or head, as a share of the pages that one has on average at the end.
CAPACITIES = (1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Reader:
    """What the tokens of a text belong to and read, in a layer or in a head that routes by itself.

    Args:
        name: of the layer or head.
        lists: ``(T,)``, which list each token goes to.
        reads: bool ``(T, lists)``, which lists each token reads.
        window, sinks: of its pattern.
    """

    name: str
    lists: Tensor
    reads: Tensor
    window: int
    sinks: int


@dataclass(frozen=True)
class Paging:
    """What decoding reads, as means over steps.

    Args:
        name: of the layer or head.
        pages: at the last step.
        filled: tokens for each place in them.
        read: share of the pages that are there.
        new: share of the read ones that the step before did not read.
        missed: by capacity, share of the read ones that have to be fetched.
        missed_shuffled: likewise, of the control.
    """

    name: str
    pages: int
    filled: float
    read: float
    new: float
    missed: dict[str, float]
    missed_shuffled: dict[str, float]


@torch.no_grad()
def readers(model: Any, ids: Tensor) -> list[Reader]:
    """All layers or heads with groups, from one forward of ``ids (T,)``."""
    found: list[Reader] = []

    def observe(router: Any, _: Tensor, memberships: Tensor) -> None:
        belongs = memberships[0]
        reads = router.reads[0] if isinstance(router, HeadView) else belongs
        sets, lists = belongs.unique(dim=0, return_inverse=True)
        pattern = router.pattern if isinstance(router, HeadView) else router.routing_config.pattern
        if not reads.any():
            return  # a head that has groups under another budget only
        share = (reads.float() @ sets.float().T) > 0
        found.append(Reader(router.name, lists, share, pattern.local_window, pattern.sink_tokens))

    with observe_routing(model, observe):
        model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    return found


def asked_pages(reader: Reader, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Which pages each step reads, and which are there: bool ``(steps, pages)`` each.

    Args:
        reader: of ``T`` tokens.
        first: the step from which on; each token after it is one.
        size: tokens in a page.
    """
    tokens = torch.arange(reader.sinks, len(reader.lists))
    lists = reader.lists[tokens]
    rank = torch.stack([(lists == some).long().cumsum(0) - 1 for some in range(reader.reads.shape[1])])
    place = rank.gather(0, lists[None])[0]
    opens = place % size == 0
    opened, of = tokens[opens], lists[opens]  # a page is there once its first token has left the window
    steps = torch.arange(first, len(reader.lists))
    there = opened < (steps - reader.window)[:, None]
    return reader.reads[steps][:, of] & there, there


def simulate(some: Sequence[Reader], first: int, size: int, generator: torch.Generator) -> list[Paging]:
    """What decoding from token ``first`` on reads and misses, in each of them."""
    pairs = [asked_pages(reader, first, size) for reader in some]
    widest = max(asked.shape[1] for asked, _ in pairs)
    asked, there = (
        torch.stack([F.pad(x, (0, widest - x.shape[1])) for x in tensors], dim=1)
        for tensors in zip(*pairs, strict=True)
    )
    mean_pages = there[-1].sum(dim=-1).float().mean().item()
    order = torch.randperm(asked.shape[0], generator=generator)
    missed = {share: misses(asked, round(mean_pages * share)) for share in CAPACITIES}
    shuffled = {share: misses(asked[order], round(mean_pages * share)) for share in CAPACITIES}
    new = _share(asked[1:] & ~asked[:-1], asked[1:])
    read, pages = _share(asked, there), there[-1].sum(dim=-1)
    found = []
    for place, reader in enumerate(some):
        tokens = len(reader.lists) - 1 - reader.window - reader.sinks
        found.append(
            Paging(
                reader.name,
                int(pages[place]),
                tokens / (int(pages[place]) * size),
                read[place].item(),
                new[place].item(),
                {f"{share:g}": values[place].item() for share, values in missed.items()},
                {f"{share:g}": values[place].item() for share, values in shuffled.items()},
            )
        )
    return found


def _share(some: Tensor, of: Tensor) -> Tensor:
    """By reader, of bool ``(steps, readers, pages)``."""
    return some.sum(dim=(0, 2)) / of.sum(dim=(0, 2)).clamp(min=1)


def misses(asked: Tensor, capacity: int) -> Tensor:
    """Share of pages read that a device with room for so many of each reader lacks: float ``(readers,)``.

    The device starts empty; the first quarter of the steps fills it and is not counted.

    Args:
        asked: bool ``(steps, readers, pages)``.
        capacity: pages.
    """
    _, readers_, pages = asked.shape
    books = DevicePages(readers_, max(1, capacity), pages)
    missing, read = torch.zeros(readers_), torch.zeros(readers_)
    for step, some in enumerate(asked):
        for chosen in books.rounds(some):
            _, to_copy = books.bring(chosen)
            if step >= len(asked) // 4:
                missing, read = missing + to_copy.sum(dim=1), read + (chosen >= 0).sum(dim=1)
    return missing / read.clamp(min=1)


def summary(found: Iterable[Paging]) -> dict[str, Any]:
    """Means over layers or heads, and the range of what is read."""
    some = list(found)
    read = sorted(one.read for one in some)
    return {
        "readers": len(some),
        "pages": mean(one.pages for one in some),
        "filled": mean(one.filled for one in some),
        "read": mean(read),
        "read, least and most": (read[0], read[-1]),
        "new": mean(one.new for one in some),
        "missed": {name: mean(one.missed[name] for one in some) for name in some[0].missed},
        "missed, shuffled": {name: mean(one.missed_shuffled[name] for one in some) for name in some[0].missed},
        "fetched, of all pages": {name: mean(one.read * one.missed[name] for one in some) for name in some[0].missed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--base", help="base model, the adapter's own by default")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each text")
    parser.add_argument("--page", type=int, nargs="+", default=[64], help="tokens in a page")
    parser.add_argument("--json", type=Path, help="file for everything, reader by reader")
    args = parser.parse_args()
    model, tokenizer, _ = load_adapted(args.adapter, base=args.base)
    document = []
    for path in args.text:
        ids = tokenize_windows(tokenizer, path.read_text(encoding="utf-8"), args.length)[0]
        known = readers(model, ids)
        for size in args.page:
            found = simulate(known, args.length // 2, size, torch.Generator().manual_seed(0))
            print(json.dumps({"text": path.stem, "page": size, **summary(found)}), flush=True)
            document.append({"text": path.stem, "page": size, "readers": [asdict(one) for one in found]})
    if args.json:
        write_atomically(args.json, json.dumps(document, indent=2).encode())


if __name__ == "__main__":
    main()
