"""Cards that nobody wrote, made by PEFT and transformers themselves, are replaced; with a word in them, they stay."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils.hub import create_and_tag_model_card

from focus_hf.card import FocusModelCard, write_card
from focus_hf.card.read import is_stub, own_words, read_metadata
from focus_hf.verify.claims import HOLDS
from focus_hf.verify.files import check_files
from tests.families import focus_model


def pefts(tmp_path):
    focus_model("llama").save_pretrained(str(tmp_path / "adapter"))
    return (tmp_path / "adapter" / "README.md").read_text()


def transformers_(tmp_path, monkeypatch):
    def none(*args, **kwargs):
        raise EntryNotFoundError("no card")

    monkeypatch.setattr(ModelCard, "load", none)
    return str(create_and_tag_model_card("org/x", tags=["focus"]))


def test_pefts_card_is_nobodys_and_has_our_tag(tmp_path):
    card = pefts(tmp_path)
    assert is_stub(ModelCard(card).text) and own_words(card) == ""
    assert "focus" in ModelCard(card).data.tags
    made = write_card(tmp_path / "adapter", base_model="org/base").read_text()
    fresh = FocusModelCard.from_adapter(
        tmp_path / "adapter", repo_id="your-name/adapter", base_model="org/base", metadata={"tags": ["transformers"]}
    )
    assert ModelCard(made).text == fresh.text and "More Information Needed" not in made
    data = read_metadata(made)
    assert data["base_model"] == "org/base" and data["library_name"] == "focus_hf"
    assert set(data["tags"]) == set(fresh.metadata["tags"])


def test_transformers_card_is_nobodys(tmp_path, monkeypatch):
    card = transformers_(tmp_path, monkeypatch)
    assert "automatically generated" in card and is_stub(ModelCard(card).text) and own_words(card) == ""


def test_the_hubs_empty_template_is_nobodys():
    assert own_words(str(ModelCard.from_template(ModelCardData()))) == ""
    assert is_stub("")


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card.replace("# Model Card for Model ID", "# Law"),
        lambda card: card.replace("- **License:** [More Information Needed]", "- **License:** MIT"),
        lambda card: card + "\nTrained on my own letters.\n",
    ],
)
def test_with_a_word_in_it_it_is_somebodys(tmp_path, change):
    written = change(pefts(tmp_path))
    (tmp_path / "adapter" / "README.md").write_text(written)
    assert own_words(written)
    made = write_card(tmp_path / "adapter", base_model="org/base").read_text()
    assert ModelCard(written).text.strip() in made and "focus_hf:begin quality" not in made
    assert "focus_hf:begin summary" in made


def test_a_licence_given_in_a_stub_stays(tmp_path):
    card = ModelCard(pefts(tmp_path))
    card.data.license = "mit"
    (tmp_path / "adapter" / "README.md").write_text(str(card))
    assert read_metadata(write_card(tmp_path / "adapter", base_model="org/base").read_text())["license"] == "mit"


def test_saving_with_peft_over_our_card_leaves_no_words(tmp_path):
    """PEFT sets its own tags and puts its version below; made again, the card is ours."""
    folder = tmp_path / "adapter"
    model = focus_model("llama")
    model.save_pretrained(str(folder))
    made = write_card(folder, base_model="org/base").read_text()
    model.save_pretrained(str(folder))
    assert "### Framework versions" in (folder / "README.md").read_text()
    assert own_words((folder / "README.md").read_text()) == ""
    again = write_card(folder, base_model="org/base").read_text()
    assert set(read_metadata(again)["tags"]) == set(read_metadata(made)["tags"])


def test_a_card_under_a_persons_words_can_be_verified(tmp_path):
    pefts(tmp_path)
    folder = tmp_path / "adapter"
    (folder / "README.md").write_text("# Letters of 1890\n\nWords.\n")
    write_card(folder, base_model="org/base")
    claims = [claim for claim in check_files(folder) if "card" in claim.what]
    assert claims and {claim.verdict for claim in claims} == {HOLDS}, claims


def test_unloading_takes_the_tag_off():
    model = focus_model("llama")
    assert model.get_base_model().model_tags == ["focus"]
    assert model.unload().model_tags == []
