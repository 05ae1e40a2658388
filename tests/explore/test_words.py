"""What is said of heads, from what they were made to read."""

from __future__ import annotations

import numpy as np

from focus_hf.explore import ExplorerData
from focus_hf.explore.words import HeadWords, PageWords
from tests.explore.pages import made_up


def page(receives: dict[int, tuple[int, float]], far: float = 0.5) -> ExplorerData:
    """One head that reads groups in a band, its tokens alike; group 7 is names, 8 commas."""
    data = made_up(tokens=600, layers=1, heads=1)
    head = data.heads[0]
    data.tokens[:] = [[" Anna", " Pavlovna", " Ippolit"][n % 3] if n % 10 == 7 else " w" + str(n) for n in range(600)]
    data.tokens[8::10] = [","] * 60
    head.groups[:] = np.arange(600) % 10
    head.places[:], head.received[:], head.far[:] = 100, 0.0, far
    for group, (band, mean) in receives.items():
        head.received[head.groups == group, band] = 100 * 3 * mean
    return data


def all_words(data: ExplorerData) -> list[HeadWords]:
    return [PageWords(data).of(head) for head in data.heads]


def test_words_are_what_is_read_most_and_where():
    (words,) = all_words(page({7: (1, 0.004), 8: (2, 0.001), 3: (0, 0.0001)}))
    assert words.sentence == f"looks back for {words.groups[0].name}, 129 to 256 tokens away"
    assert [group.group for group in words.groups] == [7, 8] and words.groups[0].weight > 0.7
    assert words.groups[1].name in ("commas", "punctuation") and words.groups[1].distance == "257 or more tokens away"
    (both,) = all_words(page({7: (1, 0.002), 8: (1, 0.002)}))
    assert f" and {both.groups[1].name}, " in both.sentence and both.interest < words.interest


def test_the_report_has_the_first_word():
    data = page({7: (1, 0.004)})
    data.names = {data.heads[0].key: ["mixed"] * 7 + ["names", "mixed"]}
    assert all_words(data)[0].sentence == "looks back for names, 129 to 256 tokens away"


def test_where_a_head_rests_is_not_what_it_looks_for():
    data = page({7: (1, 0.001)})
    data.heads[0].received[123] = 100 * 0.4
    (words,) = all_words(data)
    assert words.rests == [123] and words.sentence.startswith(f"looks back for {words.groups[0].name}, ")
    assert 3 not in [group.group for group in words.groups]
    data.heads[0].received[data.heads[0].groups == 7] = 0
    assert all_words(data)[0].sentence.startswith("rests: ") and all_words(data)[0].interest == 0


def test_heads_that_have_little_to_show_say_so():
    assert all_words(page({7: (1, 0.004)}, far=0.004))[0].sentence == (
        "stays near: 99.6 % of its attention is on the last 64 tokens and the first ones"
    )
    even = all_words(page({group: (1, 0.001) for group in range(10)}))[0]
    assert even.sentence == "looks back, 129 to 256 tokens away, at no group more than at others" and not even.groups
