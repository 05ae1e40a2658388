"""Every architecture is right or refused in one line: a sample here, all of them under the slow marker."""

from __future__ import annotations

import pytest

from studies.architectures.run import examine, examine_all
from studies.architectures.tiny import names

SAMPLE = {
    "llama": "",
    "falcon_h1": "",  # its layers are "hybrid": attention beside a state space
    "gemma4_text, shared keys": "",
    "bert": "",  # as a decoder
    "hrm_text": "keep their keys in a slot of the cache of their own choosing",
    "deepseek_v32": "hand indices to the attention function, which Focus does not know",
    "inkling_text": "hand position_bias to the attention function",
    "blt": "several attention layers with the number 0.*Choose one stack",
    "doge": "do not say whether they are causal",
    "bloom": "Found no attention layer in BloomForCausalLM",
}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_of_architectures(family):
    import re

    found = examine(family)
    assert found["result"] == ("refused" if SAMPLE[family] else "right"), found
    assert re.search(SAMPLE[family], found["detail"]) and "\n" not in found["detail"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sliding", [False, True])
def test_all_architectures_of_the_installed_transformers(sliding):
    found = examine_all(names(), include_sliding_layers=sliding)
    bad = {family: of["detail"] for family, of in found.items() if of["result"] in ("wrong", "obscure")}
    assert not bad
    assert sum(of["result"] == "right" for of in found.values()) >= 135
