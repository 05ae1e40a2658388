"""Which room of the house may know which, read from every import, in functions too; CONTRIBUTING.md has the map."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "focus_hf"

#: Rooms from the top of the house down: a module may import its own room, the rows below, and tools.
ROWS = (
    ("cli",),
    ("demo",),  # shows the other journeys, too
    ("",),  # the package itself, what `import focus_hf` brings
    ("explore", "verify", "compare", "bench", "vllm"),
    ("hub", "local_hub"),
    ("card",),
    ("fit", "train", "interpret"),
    ("recipe", "placement"),
    ("evaluate",),
    ("adapter",),
    ("records", "machine"),
    ("attention",),
    ("routing",),
)

#: Modules that know no room, and that every room may know.
TOOLS = (
    "commits",
    "escape",
    "files",
    "front_matter",
    "output",
    "progress",
    "ranks",
    "settings",
    "texts",
)

#: Who may know the local Hub, which knows nobody, besides tests.
HOSTS = ("cli", "demo")

Graph = dict[str, set[str]]


def read(package: Path) -> tuple[Graph, Graph]:
    """Of every module of a package, which modules of the package it imports, and which other packages."""
    paths = {_name(path, package): path for path in package.rglob("*.py")}
    inside: Graph = {name: set() for name in paths}
    outside: Graph = {name: set() for name in paths}
    for name, path in paths.items():
        parts = name.split(".")
        home = parts if path.name == "__init__.py" else parts[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = home[: len(home) + 1 - node.level] if node.level else []
                source = ".".join([*start, *([node.module] if node.module else [])])
                whole = [f"{source}.{alias.name}" for alias in node.names]
                found = [module if module in paths else source for module in whole]
            else:
                continue
            for module in found:
                if module.partition(".")[0] == package.name:
                    inside[name].add(module)
                else:
                    outside[name].add(module.partition(".")[0])
    return inside, outside


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module, empty for the package itself."""
    return [*module.split("."), ""][1]


def wrong_directions(inside: Graph) -> list[str]:
    """Imports that go up, or across."""
    row = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
    row |= {tool: len(ROWS) for tool in TOOLS}
    wrong = []
    for module, imported in sorted(inside.items()):
        here = room_of(module)
        for other in sorted(imported):
            there = room_of(other)
            up = row[there] <= row[here] and not (here in TOOLS and there in TOOLS)
            leaf = (there == "local_hub" and here not in HOSTS) or (here == "local_hub" and there not in TOOLS)
            if here != there and (up or leaf):
                wrong.append(f"{module} imports {other}")
    return wrong


def reachable(module: str, inside: Graph) -> set[str]:
    """A module and everything that it imports, directly or not."""
    found, waiting = set(), [module]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += inside[name]
    return found


@pytest.fixture(scope="module")
def house():
    return read(PACKAGE)


def test_every_module_has_its_place(house):
    known = {*TOOLS, *(room for row in ROWS for room in row)}
    assert {room_of(module) for module in house[0]} == known  # a new room: give it a row, here and in CONTRIBUTING.md


def test_imports_go_down(house):
    assert wrong_directions(house[0]) == []


def test_there_are_no_circles(house):
    tuple(TopologicalSorter(house[0]).static_order())


@pytest.mark.parametrize(
    ("room", "foreign"),
    [("routing", {"transformers", "peft"}), ("attention", {"transformers", "peft"}), ("records", {"torch"})],
)
def test_what_a_room_does_without(house, room, foreign):
    inside, outside = house
    modules = [module for module in inside if room_of(module) == room]
    assert modules
    for module in modules:
        for known in reachable(module, inside):
            assert not outside[known] & foreign, f"{module} reaches {known}, which imports {outside[known] & foreign}"


def test_that_this_test_sees_what_it_should(tmp_path):
    package = tmp_path / "focus_hf"
    sources = {
        "__init__": "from .hub import push",
        "cli/__init__": "",
        "cli/start": "from .. import card",
        "card/__init__": "def make():\n    from ..hub.push import push\n    import torch.nn",
        "hub/__init__": "",
        "hub/push": "from focus_hf.card import make\nfrom ..local_hub import serve",
        "local_hub/__init__": "",
        "files": "from . import routing",
        "routing": "",
    }
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    inside, outside = read(package)
    assert inside["focus_hf.cli.start"] == {"focus_hf.card"} and inside["focus_hf"] == {"focus_hf.hub.push"}
    assert outside["focus_hf.card"] == {"torch"} and "focus_hf.card" in reachable("focus_hf", inside)
    assert wrong_directions(inside) == [
        "focus_hf.card imports focus_hf.hub.push",
        "focus_hf.files imports focus_hf.routing",
        "focus_hf.hub.push imports focus_hf.local_hub",
    ]
    with pytest.raises(CycleError):
        tuple(TopologicalSorter(inside).static_order())
