"""Cards and records that a stranger wrote: read in linear time, shown as text, or refused in one line."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from focus_hf.card import FocusModelCard
from focus_hf.card.read import read_metadata
from focus_hf.card.sections import CardText
from focus_hf.records import AdapterFileError, GroupFacts, GroupReport, LayerFacts, load_results

# -- cards ---------------------------------------------------------------------------------------------------------

METADATA = [
    "self: 1", "ignore_metadata_errors: 1", "eval_results: 7", "to_dict: 1", "__class__: 1", "get: 1",
    "model-index: 7", "model-index: [1]", "model-index: [{results: 7}]", "model-index: [{results: [{metrics: 7}]}]",
    "model-index: [{name: x, results: [{metrics: [7]}]}]", "tags: {a: 1}", "tags: [[1], {a: 1}]", "base_model: [1]",
    "base_model: {a: 1}", "license: [1]", "datasets: 7", "language: {}", "metrics: [{}]", "a: .nan",
    "a: " + "9" * 400, "a: !!python/object/apply:os.system [ls]", "a: [1", "- 1", "a: " + "[" * 9999, "\x00", "a: \t",
]  # fmt: skip


@pytest.mark.parametrize("metadata", METADATA)
def test_no_metadata_breaks_a_refresh_and_words_stay(metadata):
    made = FocusModelCard("---\nlicense: mit\ntags: [focus]\nmodel-index: []\n---\n\n<!-- focus_hf:card a -->\n# New")
    card = made.refreshing(f"---\n{metadata}\n---\n# My words")
    assert "# My words" in str(card) and card.metadata["license"] == "mit" and "focus" in card.metadata["tags"]
    assert str(FocusModelCard(str(card)).refreshing(str(card))) == str(card.refreshing(str(card)))


_OLD = re.compile(
    r"<!-- focus_hf:begin (?P<name>[a-z_]+)(?: (?P<hash>[0-9a-f]{12}))? -->\n"
    r"(?P<body>.*?)<!-- focus_hf:end (?P=name) -->\n?",
    re.DOTALL,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<!-- focus_hf:begin a -->\n", "<!-- focus_hf:begin b 0123456789ab -->\n", "<!-- focus_hf:end a -->\n",
             "<!-- focus_hf:end b -->", "<!-- focus_hf:begin a -->", "words\n", "\n"]
        ),
        max_size=12,
    )
)  # fmt: skip
def test_sections_are_those_that_one_expression_finds(pieces):
    """The expression takes quadratic time and is what a section is."""
    text = "".join(pieces).lstrip("\n")
    found = [(part.name, part.hash, part.body) for part in CardText.parse(text).parts if part.name]
    assert found == [(match["name"], match["hash"], match["body"]) for match in _OLD.finditer(text)]


def test_two_hundred_thousand_opened_sections_take_linear_time():
    for piece in (
        "<!-- focus_hf:begin a -->\n",
        "<!-- focus_hf:begin a -->\n<!-- focus_hf:end b -->\n",
        "<!-- focus_hf:card",
    ):
        started = time.thread_time()
        text = CardText.parse("<!-- focus_hf:card a -->\n" + piece * 200_000)
        assert text.names == [] and text.own_words
        assert time.thread_time() - started < 5


def test_metadata_of_a_card_takes_bounded_time():
    started = time.thread_time()
    assert read_metadata("---\n" + "a: [" * 100_000 + "\n---\n" + "---\n \n" * 100_000) == {}
    assert read_metadata("---\n" + "\n---  x" * 100_000) == {}
    assert time.thread_time() - started < 3


# -- results -------------------------------------------------------------------------------------------------------

ROW = {"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0}
EVALUATION = {"data": "t", "context_length": 8, "rows": [ROW]}


@pytest.mark.parametrize(
    "change",
    [
        {"evaluations": [{**EVALUATION, "rows": [{**ROW, "perplexity": 10**400}]}]},
        {"evaluations": [{**EVALUATION, "rows": [{**ROW, "perplexity": 0}]}]},
        {"evaluations": [{**EVALUATION, "rows": [{**ROW, "pairs": -1}]}]},
        {"evaluations": [{**EVALUATION, "rows": [{**ROW, "pairs": "1"}]}]},
        {"evaluations": [{**EVALUATION, "rows": [{**ROW, "pairs": True}]}]},
        {"evaluations": [{**EVALUATION, "rows": [1]}]},
        {"evaluations": [{**EVALUATION, "rows": 7}]},
        {"evaluations": [{**EVALUATION, "context_length": "8"}]},
        {"evaluations": [{**EVALUATION, "data": ["t"]}]},
        {"evaluations": [{**EVALUATION, "self": 1}]},
        {"evaluations": [{**EVALUATION, "source": []}]},
        {"evaluations": 7},
        {"largest_group": 10**400},
        {"largest_group": "all"},
        {"measured_with": {"torch": 2}},
        {"benchmarks": [1]},
        {"explorer": 1},
        {"schema": "1"},
        {"schema": 10**30},
        {"self": 1},
        {"unknown": 1},
    ],
)
def test_results_that_are_none_are_one_line(change, tmp_path):
    (tmp_path / "focus_results.json").write_text(json.dumps({"evaluations": [EVALUATION], **change}))
    with pytest.raises(AdapterFileError, match="focus_results.json") as error:
        load_results(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "NaN", '{"largest_group": NaN}', "[" * 100_000, "\ud800", "9" * 9999]
)
def test_files_that_are_no_results_are_one_line(text, tmp_path):
    (tmp_path / "focus_results.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(AdapterFileError, match="focus_results.json") as error:
        load_results(tmp_path)
    assert "\n" not in str(error.value)


# -- group reports -------------------------------------------------------------------------------------------------


def report(**facts):
    group = GroupFacts(**{"share": 1.0, "name": "names", **facts})
    layer = LayerFacts("layer", [group], 0.1, reads=[[0.5]], attention=[[0.2]])
    return GroupReport(1, 1, {"name": "t", "tokens": 10, "window": 5}, [layer])


def changed(path, change):
    """The JSON of a report with one value replaced; ``path`` names it."""
    values = asdict(report())
    place = values
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = change
    return json.dumps(values)


GROUP = ("layers", 0, "groups", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*GROUP, "name"), [1]),
        ((*GROUP, "covers"), "all"),
        ((*GROUP, "share"), 10**400),
        ((*GROUP, "share"), "1"),
        ((*GROUP, "top"), [1]),
        ((*GROUP, "examples"), [{"before": 1}]),
        (("layers", 0, "attention"), [[1.0, 1.0]]),
        (("layers", 0, "reads"), [1]),
        (("layers", 0, "loss"), "much"),
        (("layers", 0, "name"), {}),
        (("layers", 0, "contextual"), None),
        (("layers", 0, "pairs"), {}),
        (("layers", 0, "groups"), 1),
        (("layers", 0, "groups"), []),
        (("layers",), {"a": 1}),
        (("layers",), [1]),
        (("num_groups",), 1.0),
        (("text",), []),
        (("schema",), "1"),
        (("strip",), [1]),
    ],
)
def test_reports_that_are_none_are_one_line(path, value, tmp_path):
    (tmp_path / "focus_groups.json").write_text(changed(path, value))
    with pytest.raises(ValueError, match="focus_groups.json") as error:
        GroupReport.from_json(tmp_path / "focus_groups.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


HOSTILE = [
    "\n\n# Injected\n\n",
    "\r\n| a | b |\n|---|---|\n",
    "`\n</details>\n<script>alert(1)</script>",
    "\u2028# x\u2029",
    "\x1b[2J\x85# x",
    "</summary></details>\n\n## x",
    "<!-- focus_hf:end groups -->\n",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_report_is_markup(text, tmp_path):
    item = {"token": text, "count": 1, "lift": 2.0}
    example = {"before": text, "token": text, "after": text}
    made = report(
        top=[item], lifted=[item], examples=[example], name=text,
    )  # fmt: skip
    layer = made.layers[0]
    layer.name, made.text["name"] = text, text
    layer.split = [{"token": text, "counts": {}, "examples": {"0": example}}]
    layer.pairs = [{"query": example, "key": example, "distance": 1, "group": 0, "weight": 1.0}]
    made.setting = text
    made.to_json(tmp_path / "focus_groups.json")
    shown = GroupReport.from_json(tmp_path / "focus_groups.json").to_markdown()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]", shown)
    tokens = MarkdownIt("commonmark").enable("table").parse(shown)
    assert not [token for token in tokens if token.type == "heading_open"]
    html = [token.content for token in tokens if token.type == "html_block"]
    plain = report(top=[{"token": "a", "count": 1}]).to_markdown()
    expected = [
        token.content for token in MarkdownIt("commonmark").enable("table").parse(plain) if token.type == "html_block"
    ]
    assert len(html) == len(expected) and not any("<script" in block or "<!--" in block for block in html)
