"""The biased path where it is known in how many groups tokens are: every set of groups has a row, used or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from focus_hf.attention import Known, Pattern, Problem, Scores, WhoAttends, focus_attention
from focus_hf.attention import biased as path


def problem(batch: int, length: int, queries: int, num_groups: int, each: int, pattern: Pattern) -> Problem:
    torch.manual_seed(0)
    query = torch.randn(batch, 4, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, batch, 2, length, 8, dtype=torch.float64)
    memberships = torch.rand(batch, length, num_groups).argsort(-1) < each
    positions = torch.arange(length).expand(batch, length)
    who = WhoAttends(pattern, positions, memberships, known=Known(each, unpadded=True))
    return Problem(query, key, value, who, Scores(0.3))


@pytest.mark.parametrize("num_groups, each", [(8, 1), (8, 2), (4, 3), (64, 1), (7, 3)])
@pytest.mark.parametrize("pattern", [Pattern(5, 2), Pattern(0, 0), Pattern(5, 2, dense_below=9)])
@pytest.mark.parametrize("batch, queries", [(1, 40), (1, 17), (2, 40)])
def test_it_is_the_definition(num_groups: int, each: int, pattern: Pattern, batch: int, queries: int) -> None:
    some = problem(batch, 40, queries, num_groups, each, pattern)
    torch.testing.assert_close(focus_attention(some, path="biased"), focus_attention(some, path="masked"))


def test_blocks_of_queries_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one block alone is handed out as the kernel made it."""
    some = problem(1, 40, 40, 8, 2, Pattern(5, 2))
    whole = focus_attention(some, path="biased")
    monkeypatch.setattr(path, "MIN_QUERIES", 16)
    monkeypatch.setattr(path, "BIAS_SIZE", 1)
    torch.testing.assert_close(focus_attention(some, path="biased"), whole)


def test_what_is_known_only_saves_work(monkeypatch: pytest.MonkeyPatch) -> None:
    some = problem(1, 40, 40, 8, 2, Pattern(5, 2))
    unknown = replace(some, who=replace(some.who, known=None))
    outputs = [focus_attention(each, path="biased") for each in (some, unknown)]
    assert torch.equal(*outputs)
    monkeypatch.setattr(path, "_rows_of_sets", lambda *args: pytest.fail("nothing is known"))
    focus_attention(unknown, path="biased")
    with pytest.raises(pytest.fail.Exception, match="nothing is known"):
        focus_attention(some, path="biased")
