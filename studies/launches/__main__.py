"""Launches and host syncs of one layer, dense beside every path of Focus, as a table in Markdown.

    python -m studies.launches --lengths 512

Numbers with strokes between them are those of each batch size.
"""

from __future__ import annotations

import argparse

from focus_hf.bench import Setting

from .count import Launches, count_launches

COLUMNS = ("what", "tokens", "routing", "path", "dense", "Focus", "host syncs", "waits for")


def cells(counted: Launches) -> list[str]:
    """One row of the table."""
    setting = counted.setting
    return [
        counted.phase,
        f"{setting.length:,}",
        f"K={setting.num_groups} k={setting.top_k} {counted.routing}",
        counted.path,
        *(_by_batch(numbers) for numbers in (counted.dense, counted.focus, counted.syncs)),
        ", ".join(f"{name} {count:,}" for name, count in sorted(counted.waits_for.items())),
    ]


def _by_batch(numbers: dict[int, int]) -> str:
    found = list(numbers.values())
    return f"{found[0]:,}" if len(set(found)) == 1 else " / ".join(f"{number:,}" for number in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--local-window", type=int, default=128)
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for length in options.lengths:
        for counted in count_launches(Setting(length, local_window=options.local_window)):
            print("| " + " | ".join(cells(counted)) + " |", flush=True)


if __name__ == "__main__":
    main()
