"""Cards: what is generated is refreshed, what a person wrote stays, whatever it is."""

from __future__ import annotations

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.adapter.save import save_adapter
from focus_hf.card import FocusModelCard
from focus_hf.card.metadata import check_finite, merge_metadata
from focus_hf.card.sections import CardText, Section
from focus_hf.records import Evaluation, Results, save_results
from tests.families import focus_model
from tests.records.figures import RESULTS, ROWS


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return save_adapter(focus_model("llama"), tmp_path_factory.mktemp("card") / "adapter")


def make(adapter, **options):
    return FocusModelCard.from_adapter(adapter, repo_id="me/focus", base_model="org/base", **options)


def test_a_card_made_twice_is_the_same(adapter):
    card = make(adapter, results=RESULTS)
    assert str(card) == str(make(adapter, results=RESULTS)) == str(card.refreshing(str(card)))
    names = CardText.parse(card.text).names
    assert names == ["summary", "use", "quality", "training", "limits", "provenance", "citation"]
    assert FocusModelCard(str(card)).metadata == card.metadata


def test_refreshing_keeps_every_word_and_tag_that_a_person_wrote(adapter):
    old = make(adapter, results=RESULTS)
    written = str(old).replace("Onto a base", "My own hint inside a section.\n\nOnto a base")  # edited: stays as it is
    written = written.replace("<!-- focus_hf:begin limits", "# Story\n\nWhy I made it.\n\n<!-- focus_hf:begin limits")
    start, end = written.index("<!-- focus_hf:begin citation"), written.index("<!-- focus_hf:end citation -->")
    written = written[:start] + written[end + len("<!-- focus_hf:end citation -->\n") :] + "Last words.\n"
    head, _, rest = written[4:].partition("\n---\n")
    data = yaml.safe_load(head)
    data["tags"] += ["legal"]
    data |= {"license": "mit", "thumbnail": "x.png", "co2_eq_emissions": 12}
    written = f"---\n{yaml.safe_dump(data)}---\n{rest}"

    better = Results([Evaluation("held-out text", 48, [{**ROWS[0], "perplexity": 9.0}, ROWS[2]])])
    new = make(adapter, results=better, base=ModelCardData(license="apache-2.0"))
    card = new.refreshing(written)
    for kept in ("My own hint inside a section.", "# Story", "Why I made it.", "Last words."):
        assert kept in card.text
    assert "9.00" in card.text and "12.50" not in card.text  # refreshed
    assert "focus_hf:begin citation" not in card.text  # removed by hand: it stays away
    assert "focus_hf:begin training" not in card.text  # its data is gone
    assert "legal" in card.metadata["tags"] and card.metadata["thumbnail"] == "x.png"
    assert card.metadata["license"] == "mit"  # what the base model says is second to what a person says
    assert str(new.refreshing(str(card))) == str(card)


def test_a_stated_licence_wins_over_the_base_models_and_an_older_card_over_that(adapter):
    base = ModelCardData(license="llama3", language=["en", "de"])
    assert make(adapter).metadata.get("license") is None
    inherited = make(adapter, base=base)
    assert inherited.metadata["license"] == "llama3" and inherited.metadata["language"] == ["en", "de"]
    assert make(adapter, base=base, license="mit").metadata["license"] == "mit"
    by_hand = str(inherited).replace("license: llama3", "license: cc0-1.0")
    assert make(adapter, base=base).refreshing(by_hand).metadata["license"] == "cc0-1.0"
    assert make(adapter, base=base, license="mit").refreshing(by_hand).metadata["license"] == "mit"


def test_results_of_other_origin_stay_in_the_model_index(adapter):
    old = make(adapter, results=RESULTS).metadata
    old["model-index"][0]["results"].append(
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": "a", "name": "a"},
            "metrics": [{"type": "bleu", "value": 1, "name": "BLEU"}],
        }
    )
    index = merge_metadata(old, make(adapter, results=RESULTS).metadata)["model-index"]
    names = [metric.get("name") for result in index[0]["results"] for metric in result["metrics"]]
    assert names.count("BLEU") == 1 and len(names) == 3


def test_a_template_of_ones_own(adapter, tmp_path):
    own = tmp_path / "mine.md.jinja"
    own.write_text(
        "<!-- focus_hf:card -->\n# {{ repo_id }}\n<!-- focus_hf:begin facts -->\nK={{ config.num_groups }}\n"
        "<!-- focus_hf:end facts -->\n"
    )
    card = make(adapter, template=own)
    assert "K=4" in card.text and "<details>" not in card.text and CardText.parse(card.text).names == ["facts"]
    own.write_text("{{ config.__class__.__mro__[1].__subclasses__() }}")  # from a stranger: the sandbox says no
    with pytest.raises(ValueError, match="The card cannot be made: .*unsafe"):
        make(adapter, template=own)
    with pytest.raises(ValueError, match="does not exist"):
        make(adapter, template=tmp_path / "none.jinja")


def test_any_metadata_can_be_set_and_numbers_are_plain(adapter):
    import numpy as np

    card = make(adapter, metadata={"tags": ["law"], "model_name": "X", "score": np.float32(0.5), "n": np.int64(3)})
    data = yaml.safe_load(str(card)[4:].partition("\n---\n")[0])
    assert "law" in data["tags"] and "focus" in data["tags"] and data["score"] == 0.5 and data["n"] == 3
    with pytest.raises(ValueError, match="metadata.score is nan"):
        make(adapter, metadata={"score": float("nan")})
    assert check_finite({"a": [np.float64(1.0), (True, None)]}) == {"a": [1.0, [True, None]]}


def test_speed_is_shown_with_its_machine(adapter):
    row = {"what": "prefill", "length": 16384, "num_groups": 4, "top_k": 1, "dense_ms": 200.0, "focus_ms": 50.0}
    card = make(adapter, results=Results(speed=[{**row, "measured_with": "one | GPU"}]))
    assert "| a prompt | 16,384 | `top_k=1` | 200.0 | 50.0 | 4.00x |" in card.text
    assert "On one &#124; GPU." in card.text
    assert (
        "- **Time**: times as fast as dense attention: prompts 4.00 at 16,384 tokens (on one &#124; GPU)." in card.text
    )
    card = make(adapter, results=Results(speed=[{**row, "pairs": 0.05, "measured_with": ""}])).text
    assert "| a prompt | 16,384 | 5 % of the pairs |" in card and "4.00 at 16,384 tokens (5 % of the pairs)" in card


def test_every_row_of_focus_stands_beside_its_opponent(adapter):
    """A window and sinks of as many pairs; where it was not measured, the card says so."""
    window = {"mode": "window", "top_k": 1, "width": 136, "perplexity": 11.0, "pairs": 0.3, "stderr": 0.01}
    two = {**ROWS[2], "top_k": 2}
    card = make(adapter, results=Results([Evaluation("text", 48, [*ROWS, window, two, {**window, "top_k": 2}])])).text
    lines = [line for line in card.splitlines() if line.startswith(("| **Focus**", "| window of"))]
    assert [line.split("|")[1].strip() for line in lines] == [
        "**Focus**, `top_k=1`",
        "window of 136 and sinks, pairs of top_k=1",
        "**Focus**, `top_k=2`",
        "window of 136 and sinks, pairs of top_k=2",
    ]
    assert "| +10.00 ± 1.10 % | 30 % |" in card and "Not measured here" not in card
    assert "**+5.0** \\| not measured \\| +10.0 |" in card and "less than the best of the others in 1 of 1" in card
    card = make(adapter, results=Results([Evaluation("text", 48, [*ROWS, window, two])])).text
    assert "Not measured here: a window and sinks that attend to as many pairs as `top_k=2`." in card


def test_ruler_and_copies_are_shown_beside_their_modes(adapter):
    row = {"length": 2048, "samples": 10, "seed": 0, "accuracy": 0.5, "logprob": -0.25, "pairs": 0.3}
    ruler = [
        {**row, "task": "vt", "mode": "dense", "top_k": None, "score": 0.9},
        {**row, "task": "vt", "mode": "hard", "top_k": 1, "score": 0.8},
    ]
    rows = [{**ROWS[0], "copies": 1.25, "rest": 2.5}, {**ROWS[2], "copies": 1.5, "rest": 2.625}]
    card = make(adapter, results=Results([Evaluation("text", 48, rows, copies=321)], ruler=ruler))
    assert "| vt | 90 %, -0.25 | 80 %, -0.25 |" in card.text and "at 2,048 tokens, 10 prompts" in card.text
    assert "| task | dense (base model) | **Focus**, `top_k=1` |" in card.text
    assert "321 were seen before" in card.text and "| **Focus**, `top_k=1` | 1.500 | 2.625 |" in card.text
    for wrong in ([{"task": "vt"}], [{**ruler[0], "length": "x"}, ruler[1]], [{**ruler[0], "score": "x"}]):
        with pytest.raises(ValueError, match="The card cannot be made"):
            make(adapter, results=Results(ruler=wrong))


def test_results_that_make_no_sense_are_one_line(adapter):
    row = {"what": "prefill", "length": 1, "num_groups": 4, "top_k": 1, "dense_ms": 1.0, "focus_ms": 0.0}
    for speed in ([{**row, "measured_with": ""}], [{"what": "prefill"}]):
        with pytest.raises(ValueError, match="The card cannot be made"):
            make(adapter, results=Results(speed=speed))


words = st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029"), max_size=40)
names = st.lists(st.sampled_from(["use", "quality", "groups", "limits"]), unique=True)


@settings(max_examples=60, deadline=None)
@given(names, names, st.lists(words, min_size=5, max_size=5), words)
def test_no_words_are_lost_whatever_they_are(before, after, between, body):
    """Text between sections survives a refresh, and a second refresh changes nothing."""
    between = [text.replace("<!--", "") for text in between]
    parts = []
    for name, text in zip(before, between, strict=False):
        parts += [Section(f"old {name}\n", name), Section(text + "\n")]
    old = CardText.parse(str(CardText(parts, frozenset(before))))
    new = CardText([Section(f"new {name} {body.replace('<!--', '')}\n", name) for name in after], frozenset(after))
    once = old.refreshed(new)
    assert str(CardText.parse(str(once)).refreshed(new)) == str(once)
    for text in between[: len(before)]:
        assert text in str(once)
    assert set(once.names) == set(after)
    for name in after:
        assert f"new {name} " in str(once)


def test_reading_by_the_hubs_own_client(adapter, tmp_path):
    save_results(RESULTS, adapter)
    card = make(adapter)
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.eval_results is not None and again.data.base_model == "org/base"
    assert again.data.to_dict()["focus"]["perplexity_change"] == pytest.approx(5.0)
    (adapter / "focus_results.json").unlink()


def test_card_metadata_and_text(adapter):
    card = FocusModelCard.from_adapter(
        adapter, repo_id="me/focus", base_model="org/base", results=RESULTS, license="apache-2.0", language="en"
    )
    again = ModelCard(str(card))
    data = again.data.to_dict()
    assert data["library_name"] == "focus_hf" and data["base_model"] == "org/base"
    assert data["base_model_relation"] == "adapter" and data["pipeline_tag"] == "text-generation"
    assert {"focus", "peft", "base_model:adapter:org/base"} <= set(data["tags"])
    assert [r.metric_value for r in again.data.eval_results] == [10.5, 10.5]  # one for each text
    assert data["datasets"] == ["org/texts"]
    text = card.text
    assert 'model.load_adapter("me/focus")' in text and "focus_hf.set_routing(model, top_k=2)" in text
    assert (
        "| **Focus**, `top_k=1` | 10.50 | +5.00 % | 30 % |" in text
        and "largest group of any layer held 27.0 %" in text
    )
    assert "| **Focus**, `top_k=1` | 10.50 | 30 % |" in text  # where dense was not measured
    assert "windows of 48 tokens, each token with at least 24 before it:" in text
    assert (
        "| 64 | **Focus**, `top_k=1` | 1.50 | 25 % |" in text
        and "| a&#95;task | acc | 0.5000 | 0.2500 | -0.2500 |" in text
    )
    assert "1,728" in text  # centroid parameters: 3 layers of 16 x 32 + 4 x 16


HOSTILE = "<script>alert(1)</script> | `x` {{ 7*7 }} {% raw %} ![i](http://e) \u202eevil\u200b\n---\ntags: [pwned]"


def test_hostile_text_stays_text(adapter):
    results = Results(
        [Evaluation(HOSTILE, 48, ROWS, revision=HOSTILE)],
        benchmarks=[{"task": HOSTILE, "metric": HOSTILE, "dense": 0.5, "focus": 0.25, "stderr": None}],
        measured_with={HOSTILE: HOSTILE},
        training={HOSTILE: HOSTILE},
    )
    card = FocusModelCard.from_adapter(
        adapter, repo_id="me/focus", base_model="org/base", results=results, license=HOSTILE, datasets=HOSTILE
    )
    text, data = card.text, ModelCard(str(card)).data.to_dict()
    for forbidden in ("<script", "`x`", "{{", "{%", "![i]", "\u202e", "\u200b", "](http://e)"):
        assert forbidden not in text, forbidden
    assert "49" not in text.split("Quality: every number")[1].split("dense")[0]
    assert "pwned" not in data["tags"] and data["license"] == HOSTILE
    rows = [line for line in text.splitlines() if "script" in line and line.startswith("|")]
    assert sorted(line.count("|") for line in rows) == [3, 3, 3, 6]
