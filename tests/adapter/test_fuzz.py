"""Promises about files from strangers, held to with mutated ones: see `tests.adapter.fuzz`."""

from __future__ import annotations

import json

import pytest

from tests.adapter import fuzz, mutations


def check(found, attempts):
    assert found["attempts"] == attempts and found["refused_by_focus"] > attempts / 2
    assert found["crashes"] == found["hangs"] == found["base_changed"] == 0, json.dumps(found["broken"], indent=1)
    assert not found["broken"], json.dumps(found["broken"], indent=1)


def test_some_mutated_adapters():
    check(fuzz.run(200), 200)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_mutated_adapters():
    check(fuzz.run(10_000, first=1_000_000), 10_000)


@pytest.mark.parametrize("kind", ["bytes", "header", "numbers", "config"])
def test_mutations_do_change_the_files(kind, tmp_path):
    """And the same seed gives the same files, or a finding could not be looked at again."""
    from tests.adapter.strangers import save_base_and_adapter

    _, origin = save_base_and_adapter(tmp_path)
    foreign = [("model.norm.weight", [32])]
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
    changed = 0
    for seed in range(60):
        if mutations.mutate(seed, origin, tmp_path / "once", foreign) != kind:
            continue
        mutations.mutate(seed, origin, tmp_path / "twice", foreign)
        for file in (mutations.CONFIG, mutations.WEIGHTS):
            assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
            changed += (tmp_path / "once" / file).read_bytes() != (origin / file).read_bytes()
    assert changed > 3
