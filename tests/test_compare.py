"""Two adapters of one base, by what was measured of either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from focus_hf.adapter.save import save_adapter
from focus_hf.compare import adapters_table, compare_adapters, for_whom
from focus_hf.records import Evaluation, Results, save_results
from tests.families import focus_model


def measured(**texts: tuple[float, float]) -> Results:
    """Perplexity and share of pairs on each text; dense attention has 10."""
    dense = {"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0}
    return Results(
        [
            Evaluation(name, 48, [dense, {"mode": "hard", "top_k": 1, "perplexity": found, "pairs": pairs}])
            for name, (found, pairs) in texts.items()
        ]
    )


@pytest.fixture
def both(tmp_path: Path) -> list[Path]:
    model = focus_model("llama")
    model.peft_config["default"].base_model_name_or_path = "org/base"
    folders = [save_adapter(model, tmp_path / name) for name in ("one", "two")]
    save_results(measured(law=(10.2, 0.2), code=(10.4, 0.2), more=(10.1, 0.5), alike=(10.2, 0.2)), folders[0])
    save_results(measured(law=(10.3, 0.2), code=(10.1, 0.21), more=(10.2, 0.2), alike=(10.205, 0.2)), folders[1])
    return folders


def test_which_is_for_whom(both: list[Path]) -> None:
    rows = compare_adapters(both)
    assert {row.text: row.better for row in rows} == {"law": 0, "code": 1, "more": None, "alike": None}
    (law,) = [row for row in rows if row.text == "law"]
    assert [side.focus for side in law.sides] == pytest.approx([2.0, 3.0]) and law.sides[0].pairs == 0.2
    assert for_whom("one", 0, rows) == "one is for: law." and for_whom("two", 1, rows) == "two is for: code."
    assert for_whom("one", 0, []) == "one is nowhere better by more than 0.1 %."
    console = Console(width=120, record=True)
    console.print(adapters_table(["one", "two"], rows))
    assert "+2.0 % (20 % of pairs)" in console.export_text() and json.dumps([row.to_dict() for row in rows])


def test_what_cannot_be_compared_is_one_line(both: list[Path], tmp_path: Path) -> None:
    for folders, message in (
        (both[:1], "Two adapters are compared, got 1"),
        ([both[0], tmp_path / "none"], "is not the folder of an adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_adapters(folders)
    save_results(measured(other=(10.2, 0.2)), both[1])
    with pytest.raises(ValueError, match="No text and length was measured on both"):
        compare_adapters(both)
    model: Any = focus_model("llama")
    model.peft_config["default"].base_model_name_or_path = "org/another"
    with pytest.raises(ValueError, match="two base models, org/base and org/another"):
        compare_adapters([both[0], save_adapter(model, tmp_path / "three")])
