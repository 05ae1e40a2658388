"""Slots of a paged cache, without vLLM: where tokens stand, and what is remembered beside them."""

from __future__ import annotations

import random

import pytest
import torch

from focus_hf.adapter.engines.packed import Packed
from focus_hf.vllm.router import Rotary
from focus_hf.vllm.slots import SlotTable, key_slots, rows_of

BLOCK = 4


def test_slots_of_several_requests():
    shuffled = random.Random(0).sample(range(1, 20), 12)
    table = torch.tensor([shuffled[:4], shuffled[4:8], shuffled[8:]], dtype=torch.int32)
    lengths = [1, 16, 6]
    expected = [
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, length in enumerate(lengths)
        for position in range(length)
    ]
    found = key_slots(table, lengths, BLOCK)
    assert found.dtype == torch.long and found.tolist() == expected
    assert key_slots(table[:0], [], BLOCK).tolist() == []


def test_what_stands_beyond_a_request_is_not_looked_at():
    table = torch.tensor([[3, -1, 10**6]], dtype=torch.int32)
    assert key_slots(table, [BLOCK], BLOCK).tolist() == [12, 13, 14, 15]


def test_rows_are_a_view_of_the_cache():
    by_token = torch.zeros(5, BLOCK, 2, 6)  # as vLLM lays them out: block after block, token after token
    cache = by_token.transpose(1, 2)
    rows = rows_of(cache)
    rows[2 * BLOCK + 3, 1] = 7.0
    assert cache[2, 1, 3].tolist() == [7.0] * 6 and cache.sum() == 42


def test_a_table_remembers_by_slot():
    table, generator = SlotTable(), torch.Generator().manual_seed(0)
    known = {}
    for _ in range(6):
        slots = torch.randperm(5 * BLOCK, generator=generator)[:7]
        memberships = torch.rand(7, 3, generator=generator) < 0.5
        table.write(slots, memberships, total=5 * BLOCK)
        known |= dict(zip(slots.tolist(), memberships.tolist(), strict=True))
    assert table.read(torch.tensor(list(known))).tolist() == list(known.values())
    table.write(torch.tensor([0]), torch.ones(1, 3, dtype=torch.bool), total=9 * BLOCK)  # the cache was made anew
    assert table.read(torch.arange(9 * BLOCK)).sum() == 3


def test_requests_of_a_packed_call():
    packed = Packed(torch.arange(12), query_edges=[0, 3, 4, 4, 5], key_edges=[0, 5, 6, 6, 12])
    assert packed.longest == 6
    (new, rows, positions), (which, of_keys, places) = packed.requests()
    assert new.tolist() == [[0, 1, 2]] and rows.tolist() == positions.tolist() == [[0, 1, 2, 3, 4]]
    assert which.tolist() == [[3], [4]]
    for row, (start, stop) in enumerate([(5, 6), (6, 12)]):
        real = places[row] >= 0
        assert of_keys[row, real].tolist() == list(range(start, stop))
        assert places[row, real].tolist() == list(range(stop - start))


@pytest.mark.parametrize("halves", [True, False])
def test_keys_are_turned_back(halves):
    """Rotation by an angle for each pair of numbers, of which a head may have fewer than it is long."""
    angles = torch.rand(30, 3, dtype=torch.float64)
    table, keys = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.randn(7, 2, 10, dtype=torch.float64)
    positions = torch.randint(0, 30, (7,))
    pairs = [(n, n + 3) if halves else (2 * n, 2 * n + 1) for n in range(3)]
    turned = keys.clone()
    for number, (a, b) in enumerate(pairs):
        cos, sin = (f(angles[positions, number])[:, None] for f in (torch.cos, torch.sin))
        turned[..., a] = keys[..., a] * cos - keys[..., b] * sin
        turned[..., b] = keys[..., b] * cos + keys[..., a] * sin
    back = Rotary(table, halves).turned_back(turned, positions)
    torch.testing.assert_close(back, keys.float())
