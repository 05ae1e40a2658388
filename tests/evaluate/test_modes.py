"""Focus beside its opponents: as many pairs, the same windows, nothing left behind, and how rows compare."""

from __future__ import annotations

import math

import pytest
import torch

from focus_hf.adapter import focus_layers
from focus_hf.evaluate import (
    OPPONENTS,
    Mode,
    SlidingWindows,
    at_share,
    attending,
    list_modes,
    measure_quality,
    token_losses,
)
from focus_hf.evaluate.opponents import SINKS, attend_by, make_selector
from focus_hf.evaluate.opponents.attend import routable_layers
from focus_hf.evaluate.perplexity import paired_excess
from focus_hf.evaluate.quality import matched
from focus_hf.evaluate.report import tables
from focus_hf.records import Evaluation, Results
from tests.families import CELLS, EACH, base_model, focus_model, logits, token_ids


@pytest.mark.parametrize("name", OPPONENTS)
def test_an_opponent_attends_in_the_base_model_and_leaves_no_trace(name):
    model, ids = focus_model("llama"), token_ids(batch=2, length=90)
    before, base = logits(model, ids), base_model("llama")
    mode = at_share(Mode(name, 1), 0.9, 90)
    with attending(model, mode, ids) as counted:
        found = logits(model, ids)
    assert counted.share == pytest.approx(0.9, abs=0.03) and not torch.equal(found, before)
    assert torch.equal(logits(model, ids), before) and focus_layers(model)[0].mode is None
    with attend_by(base, make_selector(name, base, ids, routable_layers(base)), keys=mode.width + 1 + SINKS):
        assert torch.equal(logits(base, ids), found)


def test_a_window_is_the_base_models_attention_under_that_mask():
    model, ids = focus_model("llama"), token_ids(batch=1, length=50)
    i, j = torch.arange(50)[:, None], torch.arange(50)
    mask = (j <= i) & ((i - j <= 17) | (j < SINKS))
    with attending(model, Mode("window", width=17)):
        found = logits(model, ids)
    torch.testing.assert_close(found, logits(base_model("llama"), ids, attention_mask=mask[None, None]))


def test_only_layers_that_the_adapter_routes_choose():
    model, ids = focus_model("gemma3_text"), token_ids(batch=1, length=50)
    with attending(model, Mode("quest", width=10)) as counted:
        logits(model, ids)
    assert counted.possible == 2 * 4 * 50 * 51 // 2  # two layers of four have a window by design


def test_a_share_of_pairs_is_for_the_block_alone():
    curves = {str(position): [[-4.0, 0.3], [-7.0, 0.9]] for position in (16, 64)}
    model, ids = focus_model("llama", **{**CELLS, "pairs_curves": curves}), token_ids(batch=1, length=50)
    before = logits(model, ids)
    with attending(model, Mode("hard", 1)):
        assert torch.equal(logits(model, ids), before)
    for text in (None, ids):
        with attending(model, Mode("hard", 1, budget="0.9"), text):
            assert not torch.equal(logits(model, ids), before)
    config = focus_layers(model)[0].routing_config
    assert config.pairs is None and config.threshold == CELLS["threshold"] and torch.equal(logits(model, ids), before)


def test_every_row_of_focus_has_its_opponents_at_equal_pairs_beside_it():
    model, windows = focus_model("llama"), token_ids(batch=4, length=80)
    text = SlidingWindows.of(windows.flatten(), 80, 80)
    rows = list(measure_quality(model, text, list_modes(["quest", "hard", "window", "dense"], [1, 2])))
    assert [(r.mode, r.top_k) for r in rows] == [
        ("dense", None),
        *((name, top_k) for top_k in (1, 2) for name in ("hard", "window", "quest")),
    ]
    for top_k in (1, 2):
        focus, window, quest = (row for row in rows if row.top_k == top_k)
        assert focus.width is None and focus.scoring is None and focus.loaded == focus.pairs
        assert window.loaded == window.pairs and quest.loaded >= quest.pairs
        for row in (window, quest):
            assert row.pairs == pytest.approx(focus.pairs, abs=1 / 80) and row.width == window.width
        assert window.scoring == {"products": 0.0, "bytes": 0.0} and quest.scoring["products"] == 1 / 16
        with attending(model, Mode("quest", width=quest.width)):
            losses = token_losses(model, windows)
        assert quest.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
        assert quest.excess == pytest.approx(math.log(quest.perplexity / rows[0].perplexity), abs=1e-6)
        each = (losses - token_losses(base_model("llama"), windows)).mean(dim=1)
        assert quest.stderr == pytest.approx((each.var() / 4).sqrt().item(), rel=1e-3)
        (again,) = measure_quality(model, text, [Mode.of(quest.to_dict())])
        assert again.perplexity == quest.perplexity and again.pairs == quest.pairs
    assert rows[0].excess == 0.0 and str(rows[2]) == f"window of {rows[2].width} and sinks, pairs of top_k=1"
    assert str(rows[3]) == "Quest, pages of 16, top_k=1"
    lines = [row.to_dict() for row in rows]
    (alike,) = tables(Results([Evaluation("text", 80, [line | {"loaded": line["pairs"]} for line in lines])]))
    assert [column.header for column in alike.columns][4:6] == ["pairs attended", "choosing"]
    assert list(alike.columns[5].cells)[3] == "+6.2 / 6.2 %"
    lines[3]["loaded"] = 0.625
    (table,) = tables(Results([Evaluation("text", 80, lines)]))
    assert [column.header for column in table.columns][4:7] == ["pairs attended", "keys loaded", "choosing"]
    assert list(table.columns[5].cells)[3] == "62 %"


def test_choosing_is_paid_for_in_pairs_where_that_is_asked_for():
    model, windows = focus_model("llama"), token_ids(batch=1, length=160)
    text = SlidingWindows.of(windows.flatten(), 160, 160)
    plain, counted = (
        list(measure_quality(model, text, list_modes(["hard", "quest"], [1]), count_scoring=count))
        for count in (False, True)
    )
    assert counted[1].pairs == pytest.approx(plain[0].pairs - 1 / 16, abs=0.01)


def test_an_opponent_without_a_width_cannot_attend():
    with pytest.raises(ValueError, match="mode 'quest' needs a width"), attending(focus_model("llama"), Mode("quest")):
        pass


def test_a_paired_error_is_that_of_the_differences():
    dense = torch.randn(6, 9) * 10
    mean, stderr = paired_excess(dense + 0.5, dense, torch.ones(6, 9, dtype=torch.bool))
    assert mean == pytest.approx(0.5, abs=1e-5) and stderr < 1e-5
    assert paired_excess(dense[:1], dense[:1], torch.ones(1, 9, dtype=torch.bool)) == (0.0, None)


@pytest.mark.parametrize("routing", [CELLS, EACH], ids=["together", "each"])
def test_what_choosing_cells_costs_is_the_numbers_of_the_adapter(routing):
    model, windows = focus_model("llama", **routing), token_ids(batch=1, length=160)
    text = SlidingWindows.of(windows.flatten(), 160, 160)
    plain, counted = (
        list(measure_quality(model, text, list_modes(["hard", "quest"], [1]), count_scoring=count))
        for count in (False, True)
    )
    layer = focus_layers(model)[0]
    config, numbers = layer.routing_config, sum(tensor.numel() for tensor in layer.tensors_of("default"))
    own, again = plain[0].scoring, config.choosers * config.num_groups * config.group_dim
    # of 160 tokens' products, by those of 160 * 161 / 2 pairs of every query head
    assert own["products"] == pytest.approx(
        160 * (numbers + again) / (160 * 161 / 2 * config.query_heads * 2 * config.head_dim), rel=1e-6
    )
    # a new token reads them once for each key head, and a group's number for each key
    assert own["bytes"] == pytest.approx(
        (numbers + config.key_value_heads * 160) / (config.key_value_heads * 160 * 2 * config.head_dim), rel=1e-6
    )
    # heads that choose together load what they read; each by itself, more
    assert (plain[0].loaded > plain[0].pairs) == config.each_query_head
    # where choosing costs Focus more than it costs Quest, Quest may read more, but never more than all
    assert counted[1].pairs == pytest.approx(min(plain[0].pairs + own["products"] - 1 / 16, 1), abs=0.01)
    quest = Mode("quest", 1)
    assert matched(quest, 0.5, 160, True, 0.2).width == matched(quest, 0.7 - 1 / 16, 160).width
    assert matched(quest, 0.99, 160, True, 0.2).width == matched(quest, 1.0, 160).width
