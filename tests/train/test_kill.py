"""A training that is killed between two steps: its checkpoint survives, and it goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from focus_hf.records import check_adapter
from focus_hf.train import last_checkpoint
from tests.cli.test_without_terminal import train_command

STEPS = ["--max-steps", 12, "--save-steps", 2, "--logging-steps", 1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_between_two_steps(tiny, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(train_command(tiny, whole, *STEPS), check=True, capture_output=True)
    process = subprocess.Popen(train_command(tiny, cut, *STEPS), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while last_checkpoint(cut / "trainer") is None and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (cut / "adapter_model.safetensors").exists()  # nothing there that looks finished
    checkpoint = last_checkpoint(cut / "trainer")
    check_adapter(checkpoint)
    assert 2 <= int(checkpoint.name.rpartition("-")[2]) < 12

    again = subprocess.run(train_command(tiny, cut, *STEPS), capture_output=True, text=True, env=dict(os.environ))
    assert again.returncode != 0 and "--resume" in again.stderr and "Traceback" not in again.stderr
    subprocess.run(train_command(tiny, cut, *STEPS, "--resume"), check=True, capture_output=True)
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (whole, cut))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
