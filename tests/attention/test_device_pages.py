"""Books of a device that is smaller than a pool, against the simplest least-recently-used ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import DevicePages


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12))
def test_they_are_those_of_a_list_in_order_of_use(seed, rows, capacity, pages):
    """The device's contents are simulated with the copies that the books ask for."""
    generator = torch.Generator().manual_seed(seed)
    books, device = DevicePages(rows, capacity, pages), torch.full((rows, capacity), -1)
    used = [[] for _ in range(rows)]  # pages on the device, the last one used last
    hits = misses = 0
    for _ in range(30):
        asked = torch.rand(rows, pages, generator=generator) < 0.3
        given_ = [[] for _ in range(rows)]
        for chosen in books.rounds(asked):
            slots, missing = books.bring(chosen)
            for row in range(rows):
                some = [page for page in chosen[row].tolist() if page >= 0]
                assert len(some) <= capacity
                given_[row] += some
                there = [page for page in some if page in used[row]]
                hits, misses = hits + len(there), misses + len(some) - len(there)
                assert missing[row].sum() == len(some) - len(there)
                kept = [page for page in used[row] if page not in some]
                room = capacity - len(some)
                used[row] = (kept[len(kept) - room :] if room < len(kept) else kept) + some
                for page, slot, copy in zip(*(x[row].tolist() for x in (chosen, slots, missing)), strict=True):
                    if copy:
                        device[row, slot] = page
                    if page >= 0:
                        assert device[row, slot] == page
        for row in range(rows):
            assert sorted(given_[row]) == asked[row].nonzero().flatten().tolist()  # each once
    assert (books.hits, books.misses) == (hits, misses)


def test_pages_keep_their_slots_under_new_numbers_and_in_other_rows():
    books = DevicePages(2, 3, 5)
    slots, _ = books.bring(torch.tensor([[1, 4], [2, -1]]))
    books.renumber(torch.tensor([[0, 0, 4, 0, 1, 0], [0, 2, 0, 0, 0, 0]]))
    again, missing = books.bring(torch.tensor([[4, 2], [1, -1]]))
    assert torch.equal(again, slots) and not missing.any()
    books.select(torch.tensor([1, 0, 0]))
    again, missing = books.bring(torch.tensor([[1, -1], [4, 2], [4, 2]]))
    assert torch.equal(again, slots[[1, 0, 0]]) and not missing.any()
    _, missing = books.bring(torch.tensor([[3, 5], [3, 5], [1, 3]]))  # and what is out is asked for again
    assert missing.tolist() == [[True, True]] * 3
