"""Threads that share a model, as those of a web server do: each gets the tokens that it gets alone."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import get_peft_model

from tests.adapter.interventions.run import draw_config, draw_tensors, routings
from tests.families import base_model, token_ids

#: Of the threads' prompts: within the window, beyond it, two sequences, long.
PROMPTS = ((1, 5), (1, 30), (2, 17), (1, 60), (3, 40), (1, 9), (2, 70), (1, 24))


@pytest.fixture(autouse=True)
def often():
    """Threads change places far more often than by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def model_of(routing: str, seed: int) -> Any:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = get_peft_model(base_model("llama"), draw_config(chance, routing))
    draw_tensors(model, seed)
    return model.eval()


def generate(model: Any, thread: int, call: int) -> list[list[int]]:
    batch, length = PROMPTS[thread % len(PROMPTS)]
    ids = token_ids(batch, length, seed=1000 * thread + call)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options).tolist()


def compare(model: Any, threads: int, calls: int) -> None:
    alone = [[generate(model, thread, call) for call in range(calls)] for thread in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        several = [
            pool.submit(lambda t=t: [generate(model, t, call) for call in range(calls)]) for t in range(threads)
        ]
        together = [one.result() for one in several]
    wrong = [(t, c) for t in range(threads) for c in range(calls) if alone[t][c] != together[t][c]]
    assert not wrong, f"{len(wrong)} of {threads * calls} calls gave other tokens, such as call {wrong[0]}"


@pytest.mark.parametrize("routing", routings())
def test_four_threads(routing):
    for seed in range(2):
        compare(model_of(routing, seed), threads=4, calls=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("routing", routings())
def test_eight_threads_of_fifty_calls(routing):
    compare(model_of(routing, seed=3), threads=8, calls=50)
