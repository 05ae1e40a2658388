"""Slots of a paged cache, without vLLM: where tokens stand, and what is remembered beside them."""

from __future__ import annotations

import random

import pytest
import torch

from focus_hf.adapter.engines.packed import Packed
from focus_hf.vllm.router import Rotary
from focus_hf.vllm.slots import groups_of, key_slots, padded_page

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "kind"), [(2, torch.uint8), (1, torch.uint8), (1, torch.int16)])
def test_groups_stand_behind_their_page(dtype, columns, kind):
    """As vLLM lays pages out: block after block with room behind each, token after token in a block."""
    length = BLOCK * 2 * 6 * dtype.itemsize
    page = padded_page(length, BLOCK, 2)
    assert page % 16 == 0 and length + BLOCK * 2 <= page < length + BLOCK * 2 + 16
    raw = torch.zeros(6 * page, dtype=torch.uint8)
    own = raw[page:].view(dtype)
    strides = (page // dtype.itemsize, 6, 2 * 6, 1)
    cache = own.as_strided((5, 2, BLOCK, 6), strides, own.storage_offset())
    tokens, groups = cache.transpose(1, 2), groups_of(cache, columns, kind)
    tokens[...] = 7.0
    groups[...] = 3
    assert cache.unique().tolist() == [7.0] and groups.shape == (5, BLOCK, columns)
    tokens[2, 3, 1] = 1.0
    assert cache[2, 1, 3].tolist() == [1.0] * 6
    for number in range(5):
        behind = raw[(number + 1) * page + length :][: BLOCK * columns * kind.itemsize].view(kind)
        assert behind.tolist() == [3] * BLOCK * columns
    assert not raw[:page].any()


def test_requests_of_a_packed_call():
    packed = Packed(torch.arange(12), query_edges=[0, 3, 4, 4, 5], key_edges=[0, 5, 6, 6, 12])
    assert packed.longest == 6
    assert [(new.start, new.stop, rows.tolist()) for new, rows in packed.requests] == [
        (0, 3, [0, 1, 2, 3, 4]),
        (3, 4, [5]),
        (4, 5, [6, 7, 8, 9, 10, 11]),
    ]


@pytest.mark.parametrize("halves", [True, False])
def test_what_is_linear_in_keys_is_so_in_turned_ones(halves):
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
    rotary, matrix = Rotary(1.5 * table, halves, 10), torch.randn(4, 10)  # lengths may be scaled, too
    turned[..., :6] *= 1.5
    both = (turned.float()[:, :, None] * rotary.angles(positions)[:, None]).flatten(2)
    torch.testing.assert_close(both @ rotary.of_turned(matrix).T, keys.float() @ matrix.T)
