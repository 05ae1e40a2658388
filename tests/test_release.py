"""What a release is made by, and what is said of one that is not there yet."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from focus_hf.card.card import INSTALL
from studies.versions import COMBINATIONS, LIBRARIES, TESTS, lowest

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
WORKFLOW = WORKFLOWS["release.yml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RANGES = {Requirement(line).name: Requirement(line).specifier for line in PROJECT["project"]["dependencies"]}


def locked(name: str) -> dict[str, list[Version]]:
    """The versions of each package in a lock file, one or one for each range of Pythons, by its normal name."""
    entries = re.split(r"^(?=[\w.-]+==)", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    versions: dict[str, list[Version]] = {}
    for entry in entries:
        found = Requirement(re.split(r"\s\\\n|\n", entry)[0])
        assert "--hash=sha256:" in entry and found.url is None, entry
        versions.setdefault(found.name.lower(), []).append(Version(next(iter(found.specifier)).version))
    return versions


def test_every_action_is_pinned_by_commit_and_says_its_version():
    used = [action for text in WORKFLOWS.values() for action in re.findall(r"uses: ([^.].*)", text)]
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
    jobs = {"audit", "build", "test-source", "test-wheel", "versions"}
    assert set(allowed) == jobs and all(one == reading for one in allowed.values())
    assert set(workflow["jobs"]["attest"]["needs"]) == set(allowed)  # only what was tested


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_workflow_starts_with_no_permission_and_keeps_no_credentials(name):
    workflow = yaml.safe_load(WORKFLOWS[name])
    assert workflow["permissions"] == {} and all("permissions" in job for job in workflow["jobs"].values())
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    assert not any("${{" in step.get("run", "") for step in steps)  # nothing from outside is pasted into a shell
    assert "secrets." not in WORKFLOWS[name] and "pull_request_target" not in WORKFLOWS[name]
    checkouts = [step for step in steps if "checkout@" in str(step)]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_the_supported_pythons_and_the_pinned_torch_are_tested():
    project = PROJECT["project"]
    matrix = yaml.safe_load(WORKFLOW)["jobs"]["test-source"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={matrix[0]}"
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert [version for version in named if "." in version] == matrix
    pinned = re.search(r"TORCH \?= (torch==\S+)", (ROOT / "Makefile").read_text())[1]
    assert f"pip install {pinned} " in WORKFLOW
    assert pinned == f"torch=={PROJECT['tool']['uv']['dependency-metadata'][0]['version']}"


def test_the_lock_is_within_the_ranges_and_every_file_of_it_has_a_hash():
    lock = locked("dev")
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["dev"]]
    asked += [line for name in ("train", "hub", "viz", "eval", "interpret", "docs") for line in extras[name]]
    for wanted in map(Requirement, asked):
        if wanted.name in ("torch", "focus-hf"):  # see pyproject.toml on torch
            continue
        for version in lock[wanted.name.replace("_", "-").lower()]:
            assert wanted.specifier.contains(version), f"{wanted}, but {version} is locked: make lock"
    assert {"uv", "pip-audit", "cyclonedx-bom", "build", "hatchling"} <= locked("release").keys()
    assert not {"torch", "triton"} & lock.keys() and not any(name.startswith("nvidia") for name in lock)


def test_the_matrix_of_versions_is_that_of_the_ranges():
    lock = locked("dev")
    for name in LIBRARIES:
        newest = max(lock[name.replace("_", "-")])
        assert RANGES[name].contains(lowest(name)) and Version(lowest(name)) < newest
        below = f"{Version(lowest(name)).major}.{Version(lowest(name)).minor - 1}"
        assert not RANGES[name].contains(below), f"{name} {below} is allowed and not tested"
        ends = dict.fromkeys((lowest(name), f"{newest.major}.{newest.minor}"))
        assert f"{name} {' to '.join(ends)}," in (ROOT / "docs/limits.md").read_text()
    assert COMBINATIONS["newest"] == () and set(COMBINATIONS["lowest"]) == set(LIBRARIES)
    assert all((ROOT / "tests" / test).is_file() for test in TESTS)


def test_cards_install_what_exists():
    released = re.search(r"^## \d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert INSTALL.startswith("pip install focus-hf" if released else "pip install .  # in a clone")
