"""The study of pages: what it says that steps read is what a cache by groups would fetch."""

from __future__ import annotations

import pytest
import torch

from focus_hf.attention import GroupedStore, Pattern, store
from studies.paging import Reader, asked_pages, simulate


def test_it_counts_the_pages_of_a_cache(monkeypatch):
    """A cache without slack, filled up to each step, has as many pages in the lists that the step reads."""
    monkeypatch.setattr(store, "PAGE", 4)
    monkeypatch.setattr(store, "SLACK", 0)
    torch.manual_seed(0)
    length, first, groups, window, sinks = 120, 60, 3, 27, 4  # ring and sinks fill whole pages
    member, read = (torch.rand(length, groups).argsort(-1) < k for k in (1, 2))
    reader = Reader("head", member.long().argmax(-1), read, window, sinks)
    asked, there = asked_pages(reader, first, 4)
    for step in range(first, length):
        keys = torch.zeros(1, 1, step, 2)
        cached = GroupedStore(Pattern(window, sinks), groups, 1, (keys, keys))
        cached.append(keys, keys, cached.pack(member[None, :step]), torch.arange(step)[None], 1)
        pages = (cached.pool.lengths[0] + 3) // 4
        assert there[step - first].sum() == pages.sum()
        assert asked[step - first].sum() == pages[read[step]].sum()


def test_a_device_that_is_too_small_for_a_step_has_what_it_has():
    """All tokens are in one list, which each step reads as a whole: room for two pages saves two of each step."""
    lists, reads = torch.zeros(64, dtype=torch.long), torch.ones(64, 1, dtype=torch.bool)
    reader = Reader("head", lists, reads, 3, 0)
    (found,) = simulate([reader], 32, 4, torch.Generator().manual_seed(0))
    pages = asked_pages(reader, 32, 4)[0][8:].sum(dim=-1)
    assert found.read == 1.0 and found.new < 0.05
    assert found.missed["0.125"] == pytest.approx(1 - 2 * len(pages) / int(pages.sum()))
