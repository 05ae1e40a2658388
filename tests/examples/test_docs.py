"""The documentation says what is there: flags, files, links, code that compiles; and it builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from focus_hf.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"])
CONFIGURED = ROOT / "mkdocs.yml"

#: What `transformers serve` takes.
SERVER_FLAGS = ("--port", "--device", "--continuous-batching", "--cb-num-blocks", "--cb-max-batch-tokens")

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[str, str]]:
    """Fenced code: language and content."""
    return [(match[2], match[3]) for match in _FENCE.finditer(text)]


def commands(text: str) -> list[str]:
    """Command lines, in fences and in sentences, continuation lines joined."""
    fenced = [line for language, body in blocks(text) if language != "python" for line in _joined(body)]
    sentences = [code for code in _INLINE.findall(_FENCE.sub("", text)) if code.startswith(("focus-hf ", "python "))]
    return [line.strip() for line in [*fenced, *sentences]]


def _joined(body: str) -> list[str]:
    return body.replace("\\\n", " ").splitlines()


def focus_arguments(line: str) -> list[str] | None:
    """What follows ``focus-hf`` (or ``-m focus_hf.cli``) on a command line; ``None`` for another program."""
    for start in ("focus-hf ", "-m focus_hf.cli "):
        before, found, after = line.partition(start)
        if found and (start.startswith("-m") or re.fullmatch(r"(\w+=\S+ )*", before)):
            return shlex.split(after.split(" | ")[0], comments=True)
    return None


@pytest.fixture(scope="module")
def known() -> dict:
    group = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }


def pages(what: str):
    return pytest.mark.parametrize(what, PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pages("page")
def test_command_lines_use_commands_and_flags_that_exist(page, known):
    for line in commands(page.read_text(encoding="utf-8")):
        arguments = focus_arguments(line)
        if not arguments or arguments[0].isupper():  # COMMAND stands for any
            continue
        assert arguments[0] in known, line
        flags = [argument.split("=")[0] for argument in arguments[1:] if argument.startswith("--")]
        for flag in flags:
            assert flag == "--help" or flag in known[arguments[0]], f"{flag} in: {line}"


@pages("page")
def test_examples_are_started_with_flags_that_they_have(page):
    for line in commands(page.read_text(encoding="utf-8")):
        if (match := re.search(r"(examples|studies)/\w+\.py", line)) is None or "accelerate launch" in line:
            continue
        script = (ROOT / match[0]).read_text(encoding="utf-8")
        for flag in re.findall(r"--[a-z][a-z-]*", line[match.end() :]):
            passed_on = match[0] == "examples/serve.py" and flag in SERVER_FLAGS
            assert passed_on or f'"{flag}"' in script or flag == "--help", f"{flag} in: {line}"


@pages("page")
def test_relative_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link) or link.startswith("#"):
            continue
        assert (page.parent / link.partition("#")[0]).exists(), link


@pages("page")
def test_files_that_are_named_exist(page):
    for name in re.findall(r"\b(?:examples|studies)/[\w/.-]+\.(?:py|ipynb|yaml)", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name


@pages("page")
def test_python_in_it_compiles(page):
    for language, body in blocks(page.read_text(encoding="utf-8")):
        if language == "python" and "--8<--" not in body:
            compile(body, str(page), "exec")


def test_every_command_is_described(known):
    listed = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert not [name for name in known if f"`{name}`" not in listed]


def test_the_checks_above_find_what_is_wrong(known):
    assert focus_arguments("HF_TOKEN=x focus-hf push DIR org/name --dry-run") == [
        "push",
        "DIR",
        "org/name",
        "--dry-run",
    ]
    assert focus_arguments("accelerate launch -m focus_hf.cli train --config f.yaml")[0] == "train"
    assert focus_arguments("pip install focus-hf") is None
    assert commands("text `focus-hf eval --json`\n```\nfocus-hf train \\\n  --model M\n```\n") == [
        "focus-hf train    --model M",
        "focus-hf eval --json",
    ]
    assert "--no-such-flag" not in known["train"] and "--num-groups" in known["train"]


@pytest.mark.skipif(not CONFIGURED.exists(), reason="no mkdocs.yml here")
def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip("mkdocs-material and mkdocstrings are not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING " not in done.stderr, done.stderr[-3000:]
    for page in (tmp_path / "site").rglob("*.html"):
        outside = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not [url for url in outside if "rel=canonical" not in url], (
            page.name
        )  # nothing is fetched from elsewhere
