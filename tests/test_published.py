"""The adapters in the repository: sound, what their cards say, made by the recipe and texts that lie beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from focus_hf.fit.recipe import FitRecipe
from focus_hf.records import check_adapter, load_results
from focus_hf.texts import hash_of
from focus_hf.verify import HOLDS, UNCHECKED, verify

ROOT = Path(__file__).parents[1]
BASES = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
}

#: Bytes of the file of weights, at most.
SIZES = {"smollm2-135m": 1_300_000, "qwen2.5-coder-0.5b": 1_390_000}


@pytest.fixture(params=BASES)
def adapter(request) -> Path:
    return ROOT / "adapters" / request.param


def test_it_is_sound_and_small(adapter):
    config = check_adapter(adapter)
    assert config.base_model_name_or_path == BASES[adapter.name] and config.by_cells and config.pairs == 0.25
    assert {"192", "193"} & set(config.pairs_curves) and {"6144", "6145"} & set(config.pairs_curves)
    assert (adapter / "adapter_model.safetensors").stat().st_size < SIZES[adapter.name]
    assert len((adapter / "adapter_config.json").read_text().splitlines()) < 60


def test_every_section_of_the_card_is_what_its_data_says(adapter):
    claims = verify(str(adapter), files_only=True)
    assert {claim.verdict for claim in claims} <= {HOLDS, UNCHECKED}, [c for c in claims if c.verdict != HOLDS]
    (sections,) = [claim for claim in claims if claim.what == "sections of the card"]
    assert sections.verdict == HOLDS


def test_the_card_says_on_which_weights_it_was_measured(adapter):
    card = ModelCard((adapter / "README.md").read_text(encoding="utf-8"))
    assert "4-bit" in card.text and card.data.base_model == BASES[adapter.name] and card.data.license == "apache-2.0"


def test_the_recipe_can_be_run_again(adapter):
    recipe = FitRecipe(**yaml.safe_load((adapter / "recipe.yaml").read_text()))
    config = check_adapter(adapter)
    assert recipe.model == BASES[adapter.name] and all((ROOT / file).is_file() for file in recipe.train_file)
    for name in ("num_groups", "group_dim", "local_window", "num_bands", "sink_tokens", "pairs", "each_query_head"):
        assert getattr(recipe, name) == getattr(config, name)
    results = load_results(adapter)
    assert results is not None
    assert recipe.lookups == results.training.get("recipe", {}).get("lookups", 0)


def test_every_figure_stands_beside_dense_attention_and_a_window(adapter):
    results = load_results(adapter)
    assert results is not None
    texts = {path.name: path for folder in BASES for path in (ROOT / "adapters" / folder / "held_out").glob("*.txt")}
    for evaluation in results.evaluations:
        assert not evaluation.unopposed
        assert evaluation.revision == hash_of([str(texts[evaluation.data])])
        assert any(row["mode"] == "hard" for row in evaluation.rows)
        # of a method that knows nothing, and of one of the field's
        assert {"window", "quest"} <= {row["mode"] for row in evaluation.rows}
    assert {path.name for path in (adapter / "held_out").glob("*.txt")} <= {one.data for one in results.evaluations}
    assert 2048 in {evaluation.context_length for evaluation in results.evaluations}


def test_pairs_are_what_was_asked_for_on_average_over_texts(adapter):
    """One threshold is one price of a pair: texts differ, their mean is what the dial says."""
    results = load_results(adapter)
    assert results is not None
    rows = [row for one in results.evaluations for row in one.rows if row["mode"] == "hard"]
    shares: dict[str, list[float]] = {}
    for row in rows:
        shares.setdefault(row["budget"], []).append(row["pairs"])
    for asked, found in shares.items():
        assert sum(found) / len(found) == pytest.approx(float(asked), rel=0.1)
        assert all(0.8 * float(asked) <= share <= 1.15 * float(asked) for share in found)


def test_no_path_of_the_machine_that_made_it_is_in_it(adapter):
    for path in adapter.glob("*"):
        if path.suffix in (".json", ".md", ".html", ".yaml"):
            assert not re.search(r"(?<![\w.])/(tmp|work|home|root)/", path.read_text(encoding="utf-8")), path.name
