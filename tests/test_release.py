"""What a release is made by, and what is said of one that is not there yet."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from focus_hf.card.template import INSTALL

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()


def test_every_action_is_pinned_by_commit_and_says_its_version():
    used = re.findall(r"uses: (.*)", WORKFLOW)
    assert used and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used), used
    pins = {action.partition("@")[0]: set() for action in used}
    for action in used:
        pins[action.partition("@")[0]].add(action)
    assert all(len(versions) == 1 for versions in pins.values()), pins  # one version of each


def test_jobs_may_do_what_they_need_and_no_more():
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {}
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items()}
    reading = {"contents": "read"}
    assert allowed.pop("attest") == {"attestations": "write", "id-token": "write"}
    assert set(allowed) == {"build", "test-source", "test-wheel"} and all(one == reading for one in allowed.values())
    assert set(workflow["jobs"]["attest"]["needs"]) == set(allowed)  # only what was tested
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert not any("${{" in script for script in scripts)  # nothing from outside is pasted into a shell
    assert "secrets." not in WORKFLOW
    checkouts = [step for job in workflow["jobs"].values() for step in job["steps"] if "checkout@" in str(step)]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_the_supported_pythons_and_the_pinned_torch_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = yaml.safe_load(WORKFLOW)["jobs"]["test-source"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={matrix[0]}"
    pinned = re.search(r"TORCH \?= (torch==\S+)", (ROOT / "Makefile").read_text())[1]
    assert f"pip install {pinned} " in WORKFLOW


def test_cards_install_what_exists():
    released = re.search(r"^## \d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert INSTALL.startswith("pip install focus-hf" if released else "pip install .  # in a clone")
