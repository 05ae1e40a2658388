"""`python -m studies.training`: what a step of training costs."""

from __future__ import annotations

from focus_hf.bench import Setting
from studies.training import measure_training


def test_training_keeps_far_less_than_a_square():
    _, memory = measure_training(Setting(1024, heads=2, kv_heads=2, head_dim=16), seconds=0.01)
    assert memory.dense >= 1024 * 1024 * 4 and memory.focus > 4 * 1024 * 2 * 16 * 4
    assert memory.ratio > 6
