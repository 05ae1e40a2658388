"""What an adapter demands of its base model."""

from __future__ import annotations

import pytest

from focus_hf.hub.prepare import check_fits
from focus_hf.records import AdapterConfig


def test_the_shapes_must_be_those_of_the_base_model():
    config = AdapterConfig(hidden_size=32, layers=[0, 1, 2])
    check_fits(config, "org/base", {"hidden_size": 32, "num_hidden_layers": 3})
    check_fits(config, "org/base", {"text_config": {"n_embd": 32, "n_layer": 4}})
    with pytest.raises(ValueError, match="hidden_size 32, but org/base has 64"):
        check_fits(config, "org/base", {"hidden_size": 64})
    with pytest.raises(ValueError, match="routes layer 2, but org/base has 2 layers"):
        check_fits(config, "org/base", {"num_hidden_layers": 2})
