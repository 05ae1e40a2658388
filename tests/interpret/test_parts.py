"""Treebanks, alignment, agreement, tokens, matching: against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.interpret import LayerMatch, agreement, match_groups, read_treebank
from focus_hf.interpret.agreement import contextual_share, lookup_table, random_table
from focus_hf.interpret.naming import Namer
from focus_hf.interpret.tokens import display, properties
from focus_hf.interpret.windows import Word, align

GOOD = """\
# newdoc id = one
# text = We don't know.
1\tWe\twe\tPRON\tPRP\tCase=Nom|Number=Plur\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod:neg\t_\t_
4\tknow\tknow\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
4.1\tghost\t_\tVERB\t_\t_\t_\t_\t_\t_
5\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_

"""

BAD = """\
# text = No such word.
1\tSome\tsome\tDET\tDT\t_\t0\troot\t_\t_

# text = Broken
1\tBroken\tbroken

# newdoc id = two
1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\tSpaceAfter=No
2\t!\t!\tPUNCT\t.\t_\t1\tpunct\t_\t_
"""


def test_a_treebank_is_read_and_its_errors_named(tmp_path):
    file = tmp_path / "small.conllu"
    file.write_text(GOOD + BAD)
    treebank = read_treebank(file)
    assert [document.text for document in treebank.documents] == ["We don't know.", "Yes!"]
    words = treebank.documents[0].words
    assert [(w.start, w.stop, w.upos) for w in words] == [
        (0, 2, "PRON"),
        (3, 8, "AUX"),
        (3, 8, "PART"),
        (9, 13, "VERB"),
        (13, 14, "PUNCT"),
    ]
    assert len(treebank.skipped) == 2
    assert treebank.skipped[0] == "small.conllu, line 11: word 'Some' is not in the sentence's text"
    assert treebank.skipped[1] == "small.conllu, line 15: 3 columns, expected 10 with tabs between"


def test_a_file_without_a_sentence_is_refused(tmp_path):
    for content, message in (("", "no sentence could be read."), ("hello\n", "The first error: none.conllu, line 1")):
        (tmp_path / "none.conllu").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_treebank(tmp_path / "none.conllu")


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_tokens_belong_to_the_word_they_overlap_most(cuts, seed):
    generator = np.random.default_rng(seed)
    text_length, words, place = sum(cuts), [], 0
    for length in cuts:
        if generator.random() < 0.8:  # the rest stands between words
            words.append(Word(place, place + length, "X"))
        place += length
    ends = sorted({*generator.integers(1, text_length + 1, size=text_length // 2 + 1).tolist(), text_length})
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    for (start, stop), found in zip(offsets, align(offsets, words), strict=True):
        overlaps = [max(0, min(stop, word.stop) - max(start, word.start)) for word in words]
        if max(overlaps, default=0) == 0:
            assert found == -1
        else:
            assert overlaps[found] == max(overlaps)


def test_agreement_of_tables_worked_out_by_hand():
    perfect = agreement(np.diag([5, 3, 2]))
    assert perfect["nmi"] == perfect["ami"] == pytest.approx(1.0)
    nothing = agreement(np.full((2, 2), 25))
    assert nothing["nmi"] == pytest.approx(0, abs=1e-9) and abs(nothing["ami"]) < 0.02
    table = np.array([[30, 10], [5, 15]])
    joint = table / table.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    information = (joint * np.log(joint / independent)).sum()
    entropies = [-(p * np.log(p)).sum() for p in (joint.sum(0), joint.sum(1))]
    assert agreement(table)["nmi"] == pytest.approx(information / np.mean(entropies))
    with pytest.raises(ValueError, match="No token has a gold category"):
        agreement(np.zeros((2, 2), dtype=int))


def test_baselines_know_nothing_or_only_the_token():
    table = np.diag([400, 300, 300])
    chance = random_table(table, seed=0)
    assert chance.sum() == 1000 and (chance.sum(axis=0) == table.sum(axis=0)).all()
    assert np.ptp(chance.sum(axis=1)) <= 1 and agreement(chance)["nmi"] < 0.02
    by_token = np.array([[8, 2], [1, 9], [5, 0]])  # three kinds of tokens in two groups
    gold = np.array([[10, 0], [0, 10], [2, 3]])
    assert lookup_table(by_token, gold).tolist() == [[12, 3], [0, 10]]
    assert contextual_share(by_token) == pytest.approx(3 / 25)


TOKENS = [" the", " The", " def", " class", ",", ".", " running", "ing", " king", " sitting", " 42", " Anna", " dog"]


def named(inside, gold_of=None, gold=None, parts=(), outside=100):
    """The name of the first of two groups: what it holds of `TOKENS`; the second holds ``outside`` of each."""
    by_token = np.zeros((len(TOKENS), 2), dtype=int)
    by_token[:, 1] = outside
    for token, count in inside.items():
        by_token[TOKENS.index(token), 0] = count
    namer = Namer(TOKENS, TOKENS, by_token.sum(axis=1), gold, parts)
    return namer.names(by_token, gold_of)[0]


def test_a_group_is_named_by_what_most_of_it_has_in_common():
    found = named({" def": 300, " class": 250, " dog": 20, ",": 20, " 42": 20})
    assert found.name == "“def” and “class”" and found.covers == pytest.approx(550 / 610)
    assert found.chance == pytest.approx(750 / 1910) and found.lookup == 1.0
    assert named({" the": 400, " The": 100, ".": 20, " dog": 20}).name == "“the”"  # one kind, however it is written
    assert named({",": 300, ".": 300}).name == "commas and full stops"
    four = {" running": 150, "ing": 150, " king": 150, " sitting": 150}
    ending = named(four, outside=1000)
    assert ending.name == "words ending in -ing" and ending.covers == 1.0
    assert ending.chance == pytest.approx(4600 / 13600)
    assert named(four).name == "mixed"  # not twice as many as in the text, of which they are half
    assert named({}).name == "empty" and named({",": 5}).name == "mixed"  # five tokens are no evidence
    mixed = named({token: 50 for token in TOKENS})
    assert mixed.name == "mixed" and mixed.covers < 0.6


def test_gold_categories_are_names_where_they_say_most():
    parts = ("DET", "PROPN")
    gold = np.zeros((len(TOKENS), 2), dtype=int)
    gold[[0, 1], 0], gold[[11, 12], 1] = 400, 200
    inside = {token: 60 for token in (" Anna", " dog", " king", " class", " sitting")}
    found = named(inside, np.array([[1, 199], [300, 200]]), gold, parts)
    assert found.name == "names" and found.covers == pytest.approx(199 / 200)


@pytest.mark.parametrize(
    ("text", "raw", "expected"),
    [
        (" the", "Ġthe", {"starts of words"}),
        (" The", "▁The", {"capitalised words", "starts of words"}),
        ("ing", "ing", {"inner parts of words"}),
        ("ing", "##ing", {"inner parts of words"}),
        (" --", "Ġ--", {"punctuation"}),
        ("$", "$", {"punctuation"}),
        (" 42", "Ġ42", {"numbers"}),
        ("\n", "Ċ", {"line breaks and spaces"}),
        ("\ufffd", "Ã", set()),
        ("a1", "a1", {"inner parts of words"}),
        ("\x07", "\x07", set()),
    ],
)
def test_the_properties_of_a_token(text, raw, expected):
    assert properties(text, raw) == expected


def test_tokens_are_shown_as_visible_text():
    assert display(" a\n\t") == "␣a⏎⇥" and display("\u202ex\x00") == "⟨U+202E⟩x⟨U+0000⟩"
    assert len(display("x" * 100)) == 32 and display("x" * 100).endswith("…")


def test_matching_finds_a_permutation_and_what_is_new():
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 4, size=2000)
    permutation = np.array([2, 0, 3, 1])
    others = permutation[groups]
    assert [(m.other, m.overlap) for m in match_groups(groups, others, 4, 4)] == [
        (2, 1.0),
        (0, 1.0),
        (3, 1.0),
        (1, 1.0),
    ]
    others[groups == 3] = generator.integers(0, 4, size=(groups == 3).sum())
    matches = match_groups(groups, others, 4, 4)
    assert [m.other for m in matches[:3]] == [2, 0, 3] and matches[3].overlap < 0.3
    with pytest.raises(ValueError, match="Groups of 3 tokens cannot be matched with those of 2"):
        match_groups(groups[:3], others[:2], 4, 4)


def test_a_group_without_a_counterpart_is_new():
    """Also where the other adapter has fewer groups, so that one of ours is left over."""
    groups = np.array([0, 0, 1, 1, 2, 2, 3])
    layer = LayerMatch("layer", 4, match_groups(groups, np.array([1, 1, 0, 0, 0, 1, 0]), 4, 2))
    assert [(m.group, m.other) for m in layer.matches] == [(0, 1), (1, 0)]
    assert layer.new == [2, 3] and layer.to_dict()["new"] == [2, 3]


CODE = '''\
import os.path as p

def add(first, *, second=1):  # two
    """Sum."""
    total = first + p.join(second)["é"]
    return total
'''


def test_python_files_have_gold_categories_of_their_own(tmp_path):
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (:\n")
    treebank = read_treebank(tmp_path / "code.py", tmp_path / "broken.py")
    (document,) = treebank.documents
    assert document.text == CODE
    assert len(treebank.skipped) == 1 and treebank.skipped[0].startswith("broken.py: no Python")
    found = [(CODE[word.start : word.stop], word.upos) for word in document.words]
    assert found[:5] == [
        ("import", "KEYWORD"),
        ("os", "IMPORT"),
        (".", "OPERATOR"),
        ("path", "IMPORT"),
        ("as", "KEYWORD"),
    ]
    kinds = {text: upos for text, upos in found if text.strip()}
    expected = {
        "def": "KEYWORD",
        "add": "DEFINITION",
        "*": "OPERATOR",
        "# two": "COMMENT",
        '"""Sum."""': "STRING",
        "total": "VARIABLE",
        "join": "CALL",
        '"é"': "STRING",
        "1": "NUMBER",
        "[": "OPEN",
    }
    assert {text: kinds[text] for text in expected} == expected
    assert ("total", "TARGET") in found and ("first", "PARAMETER") in found
    assert [kind for text, kind in found if not text.strip()].count("INDENT") == 3
    places = [(word.start, word.stop) for word in document.words]
    assert places == sorted(places) and all(a[1] <= b[0] for a, b in zip(places, places[1:], strict=False))
