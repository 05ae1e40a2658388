"""Predictions for GPUs, from the kernels' own sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from focus_hf.bench import Setting
from studies.predictions.devices import DEVICES
from studies.predictions.predict import DENSE, on_device, predict
from studies.predictions.work import decode_work, dense_work, prompt_work, together

#: What `make gpu` wrote.
MEASURED = Path(__file__).parents[2] / "studies" / "gpu" / "nvidia-h200" / "kernels.json"

LLAMA = {"num_groups": 64, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def predicted(length, phase, batch):
    found = predict(Setting(length, **LLAMA), ["H100"], [batch])
    return [p.ratio[batch] for p in found if p.phase == phase]


@pytest.mark.parametrize("batch", (1, 4, 16, 64))
def test_decoding_is_three_times_as_fast_as_dense_where_512k_tokens_are_cached(batch):
    assert predicted(2**19 // batch, "decode", batch)[0] > 3


def test_prompts_beside_the_fastest_dense_kernel_and_the_one_before():
    """Twice FlashAttention 3 is not reached: what the tokens of a tile read together, and what a kernel reaches."""
    fastest, before = predicted(32768, "prefill", 1)
    assert 1.2 < fastest < 2 < before


def test_predictions_are_near_what_was_measured():
    """Of attention without routing, on the GPU that has run it."""
    device, found = DEVICES["H200"], json.loads(MEASURED.read_text())["results"]
    assert len(found) == 8
    for row in found:
        setting, decode = Setting(row["length"], **LLAMA | {"num_groups": row["num_groups"]}), "decode" in row["kind"]
        for batch, measured in row["measured"].items():
            focus = (decode_work if decode else prompt_work)(setting, int(batch), 0.1)
            dense = dense_work(setting, int(batch), decode=decode, rate=DENSE["H200"]["cuDNN"])
            ratio = on_device(dense, device) / on_device(focus, device)
            assert 0.6 < ratio / (measured["dense"] / measured["focus"]) < 1.65, (row["kind"], row["length"], batch)


@pytest.mark.parametrize("batch, length", [(1, 2**19), (8, 65536), (64, 8192), (64, 32768)])
def test_decoding_moves_little_more_than_the_keys_that_are_read(batch, length):
    setting = Setting(length, **LLAMA)
    read = batch * 8 * length * 0.1 * 2 * 128 * 2
    assert read < sum(work.bytes for work in decode_work(setting, batch, 0.1)) <= 1.15 * read


def test_a_prompt_moves_less_than_4_gigabytes_beside_its_attention():
    setting = Setting(32768, **LLAMA)
    found = next(predict(setting, ["H100"], [1]))
    assert found.launches[1] <= 40
    own = 32768 * (32 + 8) * 2 * 128 * 2  # queries, keys, values, output
    assert sum(work.bytes for work in prompt_work(setting, 1, 0.1)) - own < 4e9


def test_what_tokens_read_together_grows_with_their_number():
    assert [together(n) for n in (1, 8, 16)] == [1.0, 2.11, 2.65]
    assert 2.65 < together(24) < 3.26 < together(48) < together(64) == together(128)


def test_a_cpu_is_not_predicted_for():
    with pytest.raises(ValueError, match="--on here predicts for a GPU, and --device is cpu"):
        list(predict(Setting(1024, **LLAMA), ["here"], [1]))


def test_every_device_has_its_dense_kernels():
    assert DENSE.keys() == DEVICES.keys()
