"""What people are told of an adapter whose heads attend in different ways: its card, info, eval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from focus_hf.adapter import focus_layers
from focus_hf.adapter.save import save_adapter
from focus_hf.card import FocusModelCard
from focus_hf.cli.find import _table
from focus_hf.evaluate import EvaluationPlan, evaluate
from focus_hf.evaluate.command import Sources, run_evaluation
from focus_hf.evaluate.run import TokenText
from focus_hf.hub.info import adapter_info
from focus_hf.records.adapter_files import read_config
from tests.adapter.test_heads import PATTERNS, heads_model
from tests.families import WINDOW, base_model, logits, token_ids

BUDGETS = {"0.3": PATTERNS, "1.0": {f"{n}.{head}": {"attend": "everything"} for n in range(3) for head in range(2)}}

#: Of the three routed layers with two heads each, by the table of the adapter and by nobody's arithmetic.
HEADS = {"groups": 2, "window": 3, "everything": 1}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: Any) -> Path:
    model = heads_model("llama", budgets=BUDGETS)
    return save_adapter(model, tmp_path_factory.mktemp("heads") / "adapter")


def test_the_configuration_says_how_heads_attend(adapter: Path) -> None:
    config = read_config(adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert config.heads_by_reach == HEADS and config.top_ks == [1]
    assert config.dense_length == WINDOW + 1
    assert config.num_parameters == sum(t.numel() for name, t in tensors.items() if "focus_balance" not in name)


def test_the_longest_context_that_is_dense_is_found() -> None:
    """It is the base model's to the bit, and one token more is not."""
    wide = {
        f"{layer}.{head}": {"attend": "window", "local_window": 20 + head} for layer in range(3) for head in (0, 1)
    }
    model, base = heads_model("llama"), base_model("llama")
    config = focus_layers(model)[0].routing_config
    config.head_patterns = wide
    assert config.dense_length == 21
    ids = token_ids(length=30)
    assert torch.equal(logits(model, ids[:, :21]), logits(base, ids[:, :21]))
    assert not torch.equal(logits(model, ids), logits(base, ids))


def test_the_card_says_what_the_heads_do(adapter: Path) -> None:
    card = FocusModelCard.from_adapter(adapter, repo_id="me/focus", base_model="org/base")
    assert "2 attend to distant tokens by 4 groups of their own, 3 to a window alone and 1 to everything" in card.text
    assert "| heads by groups, window, everything | 2, 3, 1 |" in card.text
    assert "set_routing(model, pairs=0.3)  # of 0.3, 1.0" in card.text
    assert "set_routing(model, top_k=" not in card.text  # it would undo what the budget chose for each head
    assert card.metadata["focus"]["heads"] == HEADS and card.metadata["focus"]["routing"] == "per_head"


def test_info_says_it_too(adapter: Path, capsys: Any) -> None:
    facts = adapter_info(adapter)
    assert (facts["heads"], facts["budgets"], facts["routing"]) == (HEADS, ["0.3", "1.0"], "per_head")
    rows = [column._cells for column in _table(facts).columns]
    told = dict(zip(map(str, rows[0]), map(str, rows[1]), strict=True))
    assert told["heads"] == "groups 2, window 3, everything 1" and told["budgets"] == "0.3, 1.0"


def test_modes_of_an_evaluation() -> None:
    model = heads_model("llama", gate="additive")
    text = TokenText(token_ids(batch=1, length=180)[0], "text")
    plan = EvaluationPlan(seq_lens=[60], modes=["dense", "local", "soft", "hard"], top_ks=[1, 4])
    with pytest.warns(UserWarning, match="heads that attend in different ways, so there is no soft attention"):
        (found,) = evaluate(model, [text], plan).evaluations
    rows = {(row["mode"], row["top_k"]): row for row in found.rows}
    assert list(rows) == [("dense", None), ("local", None), ("hard", 1), ("hard", 4)]
    pairs = [row["pairs"] for row in rows.values()]
    assert pairs[0] == 1 and pairs[1] < pairs[2] < pairs[3] < 1
    assert rows["hard", 1]["largest_group"] > 0.25


def test_budgets_are_chosen_for_an_evaluation(tiny: Any) -> None:
    from rich.progress import Progress

    model = heads_model("llama", budgets=BUDGETS)
    tokenizer = type("Words", (), {"__call__": lambda self, text, **_: {"input_ids": [2 + ord(c) % 40 for c in text]}})
    sources = Sources((str(tiny / "held_out.txt"),))
    plan = EvaluationPlan(seq_lens=[60], modes=["dense", "hard"], max_tokens=180)

    def measured(*pairs: str) -> list[dict[str, Any]]:
        with Progress(disable=True) as progress:
            results = run_evaluation(
                "a",
                sources,
                replace(plan, budgets=pairs),
                load=lambda _: (model, tokenizer(), tiny),
                progress=progress,
            )
        return results.evaluations[0].rows

    dense, everything = measured("1.0")
    assert everything["pairs"] == 1 and everything["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    _, less, more = measured("0.3", "1.0")
    assert less["pairs"] < 1 and (less["budget"], more["budget"]) == ("0.3", "1.0") and more == everything
    with pytest.raises(ValueError, match=r"budgets \(0.3, 1.0\), got '0.7'"):
        measured("0.7")
    with pytest.raises(ValueError, match="pairs must be a share of pairs such as 0.25, got 'half'"):
        measured("half")
