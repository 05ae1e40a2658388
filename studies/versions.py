"""The tests with the lowest and the newest supported versions of the libraries that Focus is built on.

    python -m studies.versions                                # every combination, in turn
    python -m studies.versions lowest newest                  # some of them
    python -m studies.versions newest --python python3.14     # with another interpreter

Each combination gets a fresh environment with the wheel, and the tests run outside the checkout, so that nothing but
the wheel is tested. What is lowest stands in pyproject.toml and nowhere else; newest is what pip finds within the
ranges. Needs no package itself. Ends with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]

#: Libraries whose versions are tried: Focus reaches into them.
LIBRARIES = ("transformers", "peft", "huggingface_hub")

#: Of which of them the lowest version is taken; of the others the newest that goes with it.
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "newest": (),
    **{f"lowest-{name}": (name,) for name in LIBRARIES},
    "lowest": LIBRARIES,
}

#: The invariants, the stock loaders, architectures, strangers' files, a push and a pull, the card.
TESTS = (
    "adapter/test_invariants.py",
    "adapter/test_stock_libraries.py",
    "adapter/test_architectures.py",
    "adapter/test_strangers_file.py",
    "hub/test_push_pull.py",
    "card/test_card.py",
)

_TOOLS = ("hypothesis>=6.100", "pytest>=9", "pytest-timeout>=2.4")


@dataclass(frozen=True)
class Outcome:
    """What became of one combination: the versions that were installed, tests that ran and that failed, seconds."""

    versions: dict[str, str]
    ran: int
    failed: list[str]
    seconds: float


def lowest(name: str) -> str:
    """The lowest version of a library that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(found[1] for line in project["dependencies"] if (found := re.match(rf"{name}>=([\d.]+)", line)))


def run(combination: str, python: str, torch: str, options: list[str]) -> Outcome:
    """Install one combination and run the tests with it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"focus-hf-{combination}-") as folder:
        work = Path(folder)
        subprocess.run([python, "-m", "venv", work / "venv"], check=True)
        inside = work / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        pins = [f"{name}=={lowest(name)}" for name in COMBINATIONS[combination]]
        for wanted in ([torch], [f"{ROOT}[hub]", *pins, *_TOOLS]):
            subprocess.run([inside, "-m", "pip", "install", "--quiet", *wanted], check=True)
        for part in ("tests", "studies"):  # tests of architectures use the study's
            shutil.copytree(ROOT / part, work / part)
        shutil.copy(ROOT / "pyproject.toml", work)  # holds pytest's options
        tests = [f"tests/{name}" for name in TESTS]
        command = [inside, "-m", "pytest", *tests, "--junitxml=report.xml", *options]
        subprocess.run(command, cwd=work, check=False)
        cases = list(ElementTree.parse(work / "report.xml").iter("testcase"))
        failed = [case for case in cases if {part.tag for part in case} & {"failure", "error"}]
        names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
        return Outcome(_installed(inside), len(cases), names, time.monotonic() - started)


def _installed(python: Path) -> dict[str, str]:
    names = ("torch", *LIBRARIES)
    code = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {names}))"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return dict(zip(("Python", *names), said.split(), strict=True))


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as Markdown."""
    columns = ("Python", "torch", *LIBRARIES)
    lines = [f"| combination | {' | '.join(columns)} | tests | failed | minutes |", "|---" * 6 + "|---:" * 3 + "|"]
    for name, of in outcomes.items():
        versions = " | ".join(of.versions[column] for column in columns)
        lines.append(f"| {name} | {versions} | {of.ran} | {len(of.failed)} | {of.seconds / 60:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("combinations", nargs="*", help=f"of {', '.join(COMBINATIONS)}; all of them by default")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for before anything else")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="further options of pytest")
    options = parser.parse_args()
    if unknown := set(options.combinations) - set(COMBINATIONS):
        parser.error(f"no such combination: {', '.join(sorted(unknown))}; there are {', '.join(COMBINATIONS)}")
    chosen = options.combinations or list(COMBINATIONS)
    outcomes = {name: run(name, options.python, options.torch, options.pytest) for name in chosen}
    print(table(outcomes))
    for name, of in outcomes.items():
        for test in of.failed:
            print(f"{name}: {test} failed", file=sys.stderr)
    sys.exit(any(of.failed or not of.ran for of in outcomes.values()))


if __name__ == "__main__":
    main()
