"""A share of its own for the last tokens of every call: it is as if the dial had been turned before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import focus_hf
from focus_hf.adapter import focus_layers
from focus_hf.adapter.dial import ANSWER_TOKENS, limits, limits_from
from tests.families import CELLS, EACH, FAMILIES, focus_config, focus_model, logits, token_ids

CURVES = {str(position): [[-3.0, 0.1], [-8.0, 0.9]] for position in (32, 128)}

#: A document is read with few pairs, an answer with more.
SETTINGS: dict[str, Any] = {"pairs_curves": CURVES, "pairs": 0.2}

CLOSE = {"rtol": 1e-3, "atol": 2e-4}

kinds = pytest.mark.parametrize("kind", [CELLS, EACH], ids=["cells", "each"])


def of(family: str, kind: dict[str, Any]) -> Any:
    """In float64, where rounding puts no score on the other side of a threshold."""
    model = focus_model(family, **{**kind, **SETTINGS}).double()
    focus_hf.set_routing(model, answer_pairs=0.8)
    return model


def turning(model: Any, ids: torch.Tensor, first: int, **kwargs: Any) -> torch.Tensor:
    """Logits of two calls, the dial turned by hand between them."""
    focus_hf.set_routing(model, pairs=0.2, answer_pairs=None)
    with torch.no_grad():
        before = model(input_ids=ids[:, :first], use_cache=True, **_cut(kwargs, slice(first)))
        focus_hf.set_routing(model, pairs=0.8)
        cache, rest = before.past_key_values, {**_cut(kwargs, slice(first, None)), **_masked(kwargs)}
        after = model(input_ids=ids[:, first:], past_key_values=cache, use_cache=True, **rest)
    focus_hf.set_routing(model, pairs=0.2, answer_pairs=0.8)
    return torch.cat([before.logits, after.logits], dim=1)


def _cut(kwargs: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
    return {name: value[:, part] for name, value in kwargs.items()}


def _masked(kwargs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in kwargs.items() if name == "attention_mask"}


@kinds
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_dial_turned_before_the_last_tokens_of_a_call(family, kind):
    model, ids = of(family, kind), token_ids(length=ANSWER_TOKENS + 90)
    whole = logits(model, ids, use_cache=False)
    torch.testing.assert_close(whole, turning(model, ids, 90), **CLOSE)
    focus_hf.set_routing(model, answer_pairs=None)
    plain = logits(model, ids, use_cache=False)
    torch.testing.assert_close(whole[:, :90], plain[:, :90], **CLOSE)
    assert (whole - plain)[:, 90:].abs().max() > 1e-3


@kinds
def test_padding_stands_before_a_document(kind):
    model, ids = of("llama", kind), token_ids(length=ANSWER_TOKENS + 90)
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    real = mask.bool()
    torch.testing.assert_close(logits(model, ids, **given)[real], turning(model, ids, 90, **given)[real], **CLOSE)


@kinds
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_that_are_generated_are_part_of_an_answer(kind, cache):
    model, ids = of("llama", kind), token_ids(length=ANSWER_TOKENS + 60)
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kwargs = {"cache_implementation": "static"} if cache == "static" else {}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **kwargs)
    expected = turning(model, said.sequences, 60)[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(said.logits, dim=1), expected.to(said.logits[0].dtype), **CLOSE)


@kinds
def test_with_one_threshold_for_a_document_and_with_everything_for_an_answer(kind):
    model, ids = of("llama", kind), token_ids(length=ANSWER_TOKENS + 90)
    focus_hf.set_routing(model, pairs=0.2, length=150, answer_pairs=1)
    config = focus_layers(model)[0].routing_config
    assert config.pairs is None
    found = logits(model, ids, use_cache=False)
    focus_hf.set_routing(model, answer_pairs=None)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :90], use_cache=True).past_key_values
        with model.disable_adapter():
            expected = model(input_ids=ids[:, 90:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found[:, 90:], expected, **CLOSE)


def test_limits_are_those_of_either_share() -> None:
    config, answer = (focus_config(**{**CELLS, **SETTINGS, "pairs": share}) for share in (0.2, 0.8))
    places, device = torch.arange(100)[None], torch.device("cpu")
    expected = torch.cat([limits(config, places)[:, :36], limits(answer, places)[:, 36:]], dim=1)
    assert torch.equal(limits(config, places, 0.8), expected)
    assert torch.equal(limits_from(config, 0, 100, device, 0.8), expected)
    assert torch.equal(limits_from(config, 80, 1, device, 0.8), limits(answer, places[:, 80:81]))
    assert torch.equal(limits_from(config, 80, 1, device), limits(config, places[:, 80:81]))
    compiled = torch.compile(limits, backend="eager", fullgraph=True)
    assert torch.equal(compiled(config, places, 0.8), expected)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = focus_model("llama", **{**CELLS, **SETTINGS})
    with pytest.raises(ValueError, match=r"answer_pairs=\.\.\.\): pairs must be a number from 0 .* got 30"):
        focus_hf.set_routing(model, pairs=0.5, answer_pairs=30)
    layer = focus_layers(model)[0]
    assert layer.routing_config.pairs == 0.2 and layer.answer_pairs is None
    with pytest.raises(ValueError, match=r"answer_pairs=0\.3: this adapter has no curves from a fit"):
        focus_hf.set_routing(focus_model("llama", **CELLS), answer_pairs=0.3)
    with pytest.raises(ValueError, match=r"answer_pairs is for routing='cells'; this adapter's routing is shared"):
        focus_hf.set_routing(focus_model("llama"), answer_pairs=0.3)
