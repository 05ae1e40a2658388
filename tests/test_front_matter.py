"""YAML at the start of a page, as a stranger may write it: plain values or one line that says why not."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.front_matter import MAX_CHARACTERS, MAX_VALUES, card_metadata, read_yaml, split_card

BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10 if n else ['1'])}]\n" for n in range(12))
MERGED = "a0: &a0 {k: 1}\n"
MERGED += "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))

#: PyYAML has a limit of its own since 6.0.4, which very deep text meets before ours.
DEEP = "50 levels|exceeded maximum nesting depth"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("[" * 51 + "]" * 51, "50 levels"),
        ("[" * 200_000, DEEP),
        ("a: " + "[" * 200_000 + "]" * 200_000, DEEP),
        ("{" * 200_000, DEEP),
        ("- " * 200_000, "50 levels"),
        ("? " * 200_000, "50 levels"),
        ("&a [*a]", "more than 50,000 values"),
        (BOMB, "more than 50,000 values"),
        (MERGED, "merge"),
        ("[" + "1, " * 200_000 + "]", "more than"),
        ("a" * (MAX_CHARACTERS + 1), "524,289 characters, more than 524,288"),
        ("a: " + "9" * 500_000, "500,000 digits"),
        ("a: " + ":".join(["59"] * 100_000), "299,999 digits"),
        ("!!python/object/apply:os.system [ls]", "python/object"),
        ("a: !!python/name:os.system", "python/name"),
        ("a: !!timestamp x", "groupdict"),
        ("a: !!bool x", "x"),
        ('a: !!int ""', "index"),
        ("? [1]\n: 2", "unhashable"),
        ("a: [1", "flow sequence"),
        ("a: \x00", "control characters"),
        ("a: 2001-99-99", "month"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_no_work(block, message):
    started = time.thread_time()
    with pytest.raises(ValueError, match=message) as error:
        read_yaml(block)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 300
    assert time.thread_time() - started < 3


def test_values_are_those_of_json():
    block = "a: 2020-01-01\nb: .nan\nc: !!set {x}\n1: !!binary aGk=\nd: 99999999999999999999\nno: 0x10\nx: 10_000"
    assert read_yaml(block) == {
        "a": "2020-01-01", "b": None, "c": ["x"], "1": "b'hi'", "d": 1e20, "False": 16, "x": 10000,
    }  # fmt: skip
    assert read_yaml("") is None and read_yaml("a: &x [1]\nb: *x") == {"a": [1], "b": [1]}
    assert card_metadata("# no metadata") == {} == card_metadata("---\n\n---\nx")
    with pytest.raises(ValueError, match="mapping of names"):
        card_metadata("---\n- a\n---\n")
    assert split_card("---\r\na: 1\r\n---\r\nrest") == ("a: 1", "rest")


def test_the_largest_block_takes_about_a_second():
    line = "key-{}: some words of a card\n"
    block = "".join(line.format(n) for n in range(MAX_VALUES))[: MAX_CHARACTERS - 1000].rpartition("\n")[0]
    started = time.thread_time()
    assert len(read_yaml(block)) > 10_000
    assert time.thread_time() - started < 4


@settings(max_examples=300, deadline=None)
@given(st.text("[]{}&*!|>%@`'\"#:,-? \n\tabc01.<=+_~", max_size=60))
def test_any_text_is_read_or_refused(block):
    try:
        json.dumps(read_yaml(block), allow_nan=False)
    except ValueError:
        return
    plain = yaml.load(block, Loader=yaml.CSafeLoader)  # the same, where JSON can hold it
    if isinstance(plain, str | bool | type(None)):
        assert read_yaml(block) == plain
