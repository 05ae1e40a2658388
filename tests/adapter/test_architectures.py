"""Every architecture is right or refused in one line: a sample here, all of them under the slow marker."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from studies.architectures.run import by_type, examine, examine_all
from studies.architectures.tiny import names, variant_of
from studies.architectures.why import unexplained

SAMPLE = {
    "llama": "",
    "falcon_h1": "",  # its layers are "hybrid": attention beside a state space
    "gemma4_text, shared keys": "",
    "bert": "",  # as a decoder
    "hrm_text": "",  # runs its layers several times, each time with another slot of the cache
    "zamba2": "",  # its attention has no number, and reads two hidden states side by side
    "inkling2_text": "",  # biases and a sink for each query
    "doge": "",  # adds to the scores by its mask
    "bigbird_pegasus": "",
    "blt, decoder": "",
    "blt": "several attention layers with the number 0.*Choose one stack",
    "deepseek_v32": "hand indices to the attention function, which Focus does not know",
    "qwen4_exp_text": "choose the tokens that they attend to by themselves .layer type 'indexed_attention'",
    "git": "has no causal self-attention that calls the AttentionInterface",
    "bloom": "Found no attention layer in BloomForCausalLM",
}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_of_architectures(family):
    import re

    if variant_of(family).family not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    found = examine(family)
    assert found["result"] == ("refused" if SAMPLE[family] else "right"), found
    assert re.search(SAMPLE[family], found["detail"]) and "\n" not in found["detail"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sliding", [False, True])
def test_all_architectures_of_the_installed_transformers(sliding):
    found = examine_all(names(), **({"include_sliding_layers": True} if sliding else {}))
    bad = {family: of["detail"] for family, of in found.items() if of["result"] in ("wrong", "obscure")}
    assert not bad
    assert list(by_type(found).values()).count("right") >= 150
    assert sliding or unexplained(by_type(found)) == []
