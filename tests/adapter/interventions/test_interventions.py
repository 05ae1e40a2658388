"""No wrong answer without a word: whatever is done between two calls, the next one is what the definition says."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

from focus_hf.adapter import focus_layers
from tests.adapter.interventions.catalogue import INTERVENTIONS
from tests.adapter.interventions.run import open_session, routings, run, trial
from tests.adapter.interventions.session import Wrong
from tests.families import FAMILIES


@pytest.mark.parametrize("routing", routings())
@pytest.mark.parametrize("intervention", INTERVENTIONS)
def test_intervention(intervention, routing):
    """Each in a few models; all of them with all models under the slow marker."""
    done = 0
    for seed in range(40):
        family = list(FAMILIES)[(seed + list(INTERVENTIONS).index(intervention)) % len(FAMILIES)]
        found = trial(seed, routing, family, intervention)
        assert found["outcome"] not in ("wrong", "raised"), found["why"]
        done += found["outcome"] == "right"
        if done == 6:
            return
    raise AssertionError(f"{intervention} was right {done} times only, the others said nothing")


@pytest.mark.parametrize("routing", routings())
def test_a_wrong_answer_is_seen(routing):
    """The other way round: a model whose groups are other ones than those that the truth reads is found out."""
    seen = 0
    for seed in range(12):
        session = open_session(seed, routing, "llama")
        for layer in focus_layers(session.model):
            own = layer.focus_balance
            noise = torch.randn(own["default"].shape, generator=torch.Generator().manual_seed(seed))
            session.reference.routers[layer.name] = copy.deepcopy(layer)
            own["default"].data += 30 * noise
        try:
            session.call(12)
        except Wrong:
            seen += 1
    assert seen >= 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_hundred_models():
    found = run(500)
    assert found["outcomes"]["right"] > 7000 and not found["found"], json.dumps(found["found"][:20], indent=1)


#: Prompts and tokens under numbers as large as a file may hold: the memory that they take.
LONG = """
import resource, sys, torch
from transformers import DynamicCache
from tests.families import focus_model, token_ids

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for field in ("local_window", "sink_tokens", "dense_below"):
    numbers = {"local_window": 4, "sink_tokens": 1, "dense_below": 0, field: 2**29}
    model = focus_model("llama", routing=sys.argv[1], **numbers)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for length in (60, 1, 1, 5):
            model(input_ids=token_ids(length=length), past_key_values=past, use_cache=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("routing", routings())
def test_nothing_is_as_long_as_a_number_in_a_file(routing):
    command = [sys.executable, "-c", LONG, routing]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 100  # MiB; a tensor of so many bytes has 512
