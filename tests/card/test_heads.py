"""What people are told of an adapter whose heads route by themselves: its card's first screen, its front matter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from focus_hf.adapter.save import save_adapter
from focus_hf.card import FocusModelCard
from focus_hf.card.figures import dial_figure, dial_points
from focus_hf.local_hub.markdown import to_html
from focus_hf.records import Evaluation, GroupFacts, GroupReport, LayerFacts, Results
from focus_hf.records.adapter_files import GROUPS_FILE, read_config
from focus_hf.records.pictures import digest, digest_in
from tests.families import WINDOW, focus_model

CURVES = {"96": [[-3.0, 0.1], [-9.0, 0.6]]}


def head(layer: int, loss: float) -> LayerFacts:
    """Of three groups; the first is names, far away, the second is empty, the third mixed."""
    example = {"before": "by ", "token": "␣Anna", "after": " ."}
    groups = [
        GroupFacts(0.4, "names", 0.9, 0.05, 0.92, 0.1, examples=[example] * 5),
        GroupFacts(0.0, "empty"),
        GroupFacts(0.6, "mixed", 0.3, lifted=[{"token": "a", "count": 3, "lift": 2.0}]),
    ]
    gold = {which: {"nmi": nmi, "ami": nmi} for which, nmi in (("groups", 0.3), ("random", 0.01), ("lookup", 0.4))}
    return LayerFacts(
        f"model.layers.{layer}.self_attn.1",
        groups,
        0.2,
        {"upos": gold},
        reads=[[0.1, 0.5, 0.0], [0.0] * 3, [0.2, 0.0, 0.0]],
        attention=[[0.01, 0.2, 0.02], [0.0] * 3, [0.05, 0.0, 0.0]],
        silent=0.4,
        loss=loss,
        loss_error=0.001,
        head=1,
    )


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: Any) -> Path:
    model = focus_model("llama", routing="cells", num_groups=3, num_bands=3, pairs=0.25, pairs_curves=CURVES)
    out = save_adapter(model, tmp_path_factory.mktemp("heads") / "adapter")
    layers = [head(layer, 0.001 * layer) for layer in range(12)]
    GroupReport(
        3, 1, {"name": "t", "tokens": 99, "window": 64}, layers, bands=[8, 16, 32], setting="pairs=0.25",
        attention_layers=18, routed_layers=3,
    ).to_json(out / GROUPS_FILE)  # fmt: skip
    return out


def measured(*texts: str) -> Results:
    """Four texts at four lengths, two settings each."""

    def row(mode: str, perplexity: float, pairs: float, budget: str | None) -> dict[str, Any]:
        return {"mode": mode, "top_k": 2, "budget": budget, "perplexity": perplexity, "pairs": pairs}

    rows = [{"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0}]
    for budget, factor in (("0.4", 0.5), ("0.25", 1.0)):
        share = float(budget) - 0.01
        for mode, worse in (("hard", 0.2), ("window", 1.0), ("quest", 0.4), ("clusters", 0.1), ("oracle", 0.0)):
            rows.append(row(mode, 10 + factor * worse, share, budget))
    return Results(
        [
            Evaluation(text, length, rows, revision=f"sha256:{text}")
            for text in texts
            for length in (2048, 1024, 4096, 8192)
        ]
    )


def made(adapter: Path, results: Results | None = None) -> FocusModelCard:
    return FocusModelCard.from_adapter(adapter, repo_id="me/focus", base_model="org/base", results=results)


def test_the_configuration_says_how_heads_attend(adapter: Path) -> None:
    config, tensors = read_config(adapter), load_file(adapter / "adapter_model.safetensors")
    assert config.by_cells and config.dense_length == WINDOW + 1
    assert config.num_parameters == sum(t.numel() for name, t in tensors.items() if "focus_balance" not in name)


def test_the_first_screen_says_it_all(adapter: Path) -> None:
    card = made(adapter, measured("plays.txt", "novel.txt", "law.txt", "code.txt"))
    lines = card.text.splitlines()
    first = lines[: lines.index("<details>")]
    assert len(first) <= 60
    screen = "\n".join(first)
    assert (
        "attends to 24 % of the pairs" in screen
        and "perplexity is +2.0 % above dense attention's on 4 texts" in screen
    )
    assert "3 of its 18 attention layers; the other 15 stay as they are" in screen
    assert screen.count("| **+2.0** \\| +1.0 \\| +10.0 ") == 4 * 4  # all texts and lengths at the adapter's setting
    assert "best opponent (clusters of 16 keys)" in screen and "the best of the others in 0 of 16" in screen
    assert "set_routing(model, pairs=0.15)" in screen and "top_k" not in card.text.split("Quality: every")[0]
    assert "| layer 11, head 1 | **names** 90 % (17 to 32 back) | +0.0110 ± 0.0010 | 40 % |" in screen
    assert "| layer 1, head 1 |" not in screen  # ten are told
    assert "a look-up by token 0.40, which is better in 12 of 12" in screen
    assert "Of 36 groups 12 have a name" in screen and "12 are mixed (60 % of the tokens) and 12 empty" in screen
    assert card.text.count("by <b>") == 0 and card.text.count("by **Anna** .") == 10 * 5


def test_everything_else_is_folded_and_the_local_hub_folds_it(adapter: Path) -> None:
    card = made(adapter, measured("plays.txt"))
    html = to_html(card.text)
    assert html.count("<details>") == html.count("</details>") == card.text.count("<details>") > 14
    assert "&lt;details" not in html and "<summary>Quality: every number</summary>" in html
    hostile = (
        "<details>\n<summary><b onclick=x>&lt;i&gt;</summary>\n\nx\n\n</details>\n\n</details>\n\n<details>\n<script>"
    )
    html = to_html(hostile)
    assert re.findall(r"<(?!/?(?:p|details|summary)>)[^>]*>", html) == []
    assert html.count("<details>") == html.count("</details>") == 1


def test_front_matter_has_one_perplexity_for_each_text(adapter: Path) -> None:
    card = made(adapter, measured("plays.txt", "novel.txt"))
    (index,) = card.metadata["model-index"]
    assert [result["dataset"]["name"] for result in index["results"]] == ["plays.txt", "novel.txt"]
    (metric,) = index["results"][0]["metrics"]
    assert metric["name"] == "perplexity at 2048 tokens, Focus, pairs=0.25" and metric["value"] == pytest.approx(10.2)
    focus = card.metadata["focus"]
    assert focus["perplexity_change"] == pytest.approx(2.0) and focus["pairs"] == 0.24 and focus["groups"] == ["names"]
    assert list(focus["losses"]) == ["plays.txt", "novel.txt"] and focus["losses"]["plays.txt"] == pytest.approx(2.0)


def test_the_dial_is_drawn_from_what_was_measured(adapter: Path) -> None:
    results = measured("plays.txt", "novel.txt")
    points = dial_points(results)
    assert list(points) == [1024, 2048, 4096, 8192]
    assert points[1024]["hard"] == [pytest.approx((24, 2.0)), pytest.approx((39, 1.0))]
    path = dial_figure(results, adapter)
    try:
        assert path is not None and digest_in(path) == digest(points)
        assert "![Loss against pairs" in made(adapter, results).text
        other = replace(results, evaluations=results.evaluations[:1])
        assert digest_in(path) != digest(dial_points(other)) and digest_in(adapter / GROUPS_FILE) is None
    finally:
        (adapter / "figures" / "dial.png").unlink(missing_ok=True)
    assert dial_figure(Results(), adapter) is None
