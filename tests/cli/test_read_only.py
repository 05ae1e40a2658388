"""Folders that a plain user may read and not write: one line that names what could not be written, nothing changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import focus_hf

FOCUS_HF = Path(sys.executable).with_name("focus-hf")

#: What lets the superuser write anywhere.
_POWERS = "-dac_override,-dac_read_search,-fowner"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command, as somebody who may not write what is read-only."""
    plain = ["setpriv", "--bounding-set", _POWERS, "--inh-caps", _POWERS] if os.geteuid() == 0 else []
    if plain and shutil.which("setpriv") is None:
        pytest.skip("the superuser may write anywhere")
    return subprocess.run([*plain, FOCUS_HF, *map(str, arguments)], capture_output=True, text=True, timeout=240)


@pytest.fixture
def locked(tmp_path):
    """Makes a folder read-only, and says whether anything in it has changed since."""

    def lock(folder: Path) -> dict[str, bytes]:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    yield lock
    for path in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        path.chmod(0o755)


def test_a_card_into_a_read_only_folder(adapter, locked):
    before = locked(adapter)
    done = run("card", "--adapter", adapter, "--base-model", "org/base", "--write")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "Permission denied" in done.stderr and str(adapter / "README.md'") in done.stderr
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before


def test_a_pull_into_a_read_only_folder(adapter, hub, locked, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    focus_hf.push_to_hub(adapter, "demo/locked", base_model="org/base", endpoint=hub.endpoint, token="t")
    (tmp_path / "there").mkdir()
    locked(tmp_path / "there")
    done = run("pull", "demo/locked", tmp_path / "there" / "mine")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("focus-hf: "), done.stderr
    assert "cannot be written here" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "there").iterdir())


def test_a_read_only_adapter_is_as_good_as_any(adapter, locked):
    locked(adapter)
    done = run("info", adapter, "--json")
    assert done.returncode == 0 and '"num_groups": 4' in done.stdout, done.stderr
