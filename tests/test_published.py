"""The adapter in the repository: sound, what its card says, made by the recipe and the texts that lie beside it."""

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
ADAPTER = ROOT / "adapters" / "smollm2-135m"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def results():
    return load_results(ADAPTER)


def test_it_is_sound_and_small():
    config = check_adapter(ADAPTER)
    assert config.base_model_name_or_path == BASE and config.by_cells and config.pairs == 0.25
    assert set(config.pairs_curves) >= {"385", "1537", "6144"}
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size < 1_300_000
    assert len((ADAPTER / "adapter_config.json").read_text().splitlines()) < 60


def test_every_section_of_the_card_is_what_its_data_says():
    claims = verify(str(ADAPTER), files_only=True)
    assert {claim.verdict for claim in claims} <= {HOLDS, UNCHECKED}, [c for c in claims if c.verdict != HOLDS]
    (sections,) = [claim for claim in claims if claim.what == "sections of the card"]
    assert sections.verdict == HOLDS


def test_the_card_says_on_which_weights_it_was_measured():
    card = ModelCard((ADAPTER / "README.md").read_text(encoding="utf-8"))
    assert "4-bit" in card.text and card.data.base_model == BASE and card.data.license == "apache-2.0"


def test_the_recipe_can_be_run_again():
    recipe = FitRecipe(**yaml.safe_load((ADAPTER / "recipe.yaml").read_text()))
    config = check_adapter(ADAPTER)
    assert recipe.model == BASE and all((ROOT / file).is_file() for file in recipe.train_file)
    for name in ("num_groups", "group_dim", "local_window", "num_bands", "sink_tokens", "pairs"):
        assert getattr(recipe, name) == getattr(config, name)


def test_every_figure_stands_beside_dense_attention_and_a_window(results):
    held_out = {f"{path.name}" for path in (ADAPTER / "held_out").glob("*.txt")}
    for evaluation in results.evaluations:
        assert evaluation.data in held_out and not evaluation.unopposed
        assert evaluation.revision == hash_of([str(ADAPTER / "held_out" / evaluation.data)])
        rows = [row for row in evaluation.rows if row["mode"] == "hard"]
        assert rows and all(row["pairs"] <= 1.15 * float(row["budget"]) for row in rows)
    assert {evaluation.data for evaluation in results.evaluations} == held_out
    assert 2048 in {evaluation.context_length for evaluation in results.evaluations}


def test_no_path_of_the_machine_that_made_it_is_in_it():
    for path in ADAPTER.glob("*"):
        if path.suffix in (".json", ".md", ".html", ".yaml"):
            assert not re.search(r"(?<![\w.])/(tmp|work|home|root)/", path.read_text(encoding="utf-8")), path.name
