"""What the demo says on the screen."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ..evaluate.report import tables
from ..records import Results


def show_step(console: Console, title: str, text: str) -> None:
    """What comes next."""
    console.print(f"\n[bold]{title}[/bold]: {text}", highlight=False, soft_wrap=True)


def show_quality(console: Console, results: Results, num_groups: int) -> None:
    """The table of perplexities and pairs, and how even the groups are."""
    console.print()
    for table in tables(results):
        console.print(table)
    ideal, largest = f"ideal {100 / num_groups:.1f} %", 100 * (results.largest_group or 0.0)
    console.print(f"Largest group of any layer after calibration: {largest:.1f} % ({ideal})", highlight=False)


def show_visit(console: Console, visit: dict[str, Any]) -> None:
    """What another process found that knew only the adapter's name, see `focus_hf.demo.visitor`."""
    for name, difference in visit["logit_differences"].items():
        console.print(
            f'  {name}("demo/focus"): largest difference of logits {difference:.1e}', highlight=False, soft_wrap=True
        )
    show_step(console, "Generate", "continuing held-out text")
    console.print(f"…{visit['prompt_end']}", markup=False, highlight=False, style="dim")
    console.print(visit["continuation"], markup=False, highlight=False)


def show_files(console: Console, out: Path, adapter: Path, explorer: Path, seconds: float) -> None:
    """What there is to look at, the most telling first."""
    command = "focus-hf" if shutil.which("focus-hf") else str(Path(sys.executable).with_name("focus-hf"))
    things = {
        "card": (str(adapter / "README.md"), "what the adapter is, what it costs and keeps, what its groups mean"),
        "explorer": (str(explorer), "in a browser: every token's groups, and what it attends to far away"),
        "picture": (str(adapter / "figures" / "quality.png"), "perplexity against pairs attended"),
        "local Hub": (f"{command} hub --root {out / 'hub'}", "then http://127.0.0.1:8888/demo/focus in a browser"),
    }
    console.print(f"\nDone in {seconds:.0f} s. Look at these, in this order:", highlight=False)
    for number, (name, (where, what)) in enumerate(things.items(), 1):
        console.print(f"  {number}. {name:<10} {where}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"     {'':<10} {what}", markup=False, highlight=False, soft_wrap=True, style="dim")
