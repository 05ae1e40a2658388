"""The attention function itself, in all the ways in which models call it, against formulas and the models' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2

from focus_hf.adapter import focus_layers, interface
from focus_hf.adapter.call import Call, RoutedConfig
from focus_hf.adapter.interface import focus_attention_forward
from focus_hf.attention import Pattern
from tests.families import focus_model

LENGTH = 20
SMALLEST = torch.finfo(torch.float32).min


@pytest.fixture
def module(monkeypatch):
    """What the function needs of an attention module; routed with all tokens in one group, so that it is dense."""

    def make(*, routed: bool) -> SimpleNamespace:
        config = SimpleNamespace()
        if routed:
            layer = focus_layers(focus_model("llama", num_groups=1, local_window=4, sink_tokens=1))[0]
            ranking = torch.zeros(2, LENGTH, 1, dtype=torch.int16)
            call = Call(layer, "default", Pattern(4, 1), torch.zeros(2, LENGTH, 32), 0, ranking=ranking)
            monkeypatch.setattr(interface, "current", lambda router: call)
            config = RoutedConfig(config, layer)
        return SimpleNamespace(config=config, num_key_value_groups=2, training=False, is_causal=True)

    return make


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 4, LENGTH, 8), torch.randn(2, 2, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)


def left_padded() -> torch.Tensor:
    """bool ``(B, 1, T, T)``; rows of padding attend to themselves, as transformers makes them."""
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    mask = causal.expand(2, 1, LENGTH, LENGTH).clone()
    mask[0, :, :, :5] = False
    return mask | torch.eye(LENGTH).bool()


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, SMALLEST)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_soft_capping_under_a_mask_is_gemma2s_own(kind, routed, module):
    mask = left_padded()
    given = mask if kind == "bool" else additive(mask)
    own = module(routed=routed)
    found, _ = focus_attention_forward(own, *tensors(), given, scaling=0.3, softcap=5.0)
    expected, _ = gemma2(own, *tensors(), additive(mask), scaling=0.3, softcap=5.0)
    real = slice(5, None)
    assert torch.allclose(found[:, real], expected[:, real], atol=1e-6)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", ["position_bias", "in the mask"])
def test_biases_and_sinks_are_inkling2s_own(kind, routed, module):
    inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2").eager_attention_forward
    bias, sinks = torch.randn(2, 4, LENGTH, LENGTH), torch.randn(2, 4, LENGTH, 1)
    mask = additive(left_padded())
    given = {"attention_mask": mask, "position_bias": bias}
    if kind == "in the mask":
        given = {"attention_mask": mask + bias.masked_fill(mask < 0, 0.0)}
    own = module(routed=routed)
    found, _ = focus_attention_forward(own, *tensors(), **given, scaling=0.3, sinks=sinks)
    expected, _ = inkling2(own, *tensors(), mask, scaling=0.3, position_bias=bias, sinks=sinks)
    real = slice(5, None)
    assert torch.allclose(found[:, real], expected[:, real], atol=1e-5)


def test_layers_that_choose_their_pairs_by_an_index_are_refused(module):
    with pytest.raises(NotImplementedError, match="choose their pairs by an index"):
        focus_attention_forward(module(routed=True), *tensors(), None, indices=torch.zeros(2, LENGTH, 4))
