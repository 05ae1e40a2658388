"""One new token by the numbers of groups is the definition, and numbers say what memberships do."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from focus_hf.attention import (
    EVERYTHING,
    Known,
    Pattern,
    Scores,
    TokenByNumbers,
    WhoAttends,
    Windows,
    attend_one_token,
    attended_pairs,
    masked_attention,
    memberships_of,
    numbers_of,
)
from focus_hf.bench.counting import LaunchCounter


def in_groups(routings: int, length: int, num_groups: int, each: int) -> torch.Tensor:
    """bool ``(2, T, P * K)``, with ``k`` of each routing's groups."""
    chosen = torch.rand(2, length, routings, num_groups).topk(each, dim=-1).indices
    return torch.zeros(2, length, routings, num_groups, dtype=torch.bool).scatter_(-1, chosen, True).flatten(2)


@given(seed=st.integers(0, 99), routings=st.integers(1, 3), num_groups=st.integers(1, 9), each=st.integers(1, 3))
def test_numbers_and_memberships_are_the_same(seed, routings, num_groups, each):
    torch.manual_seed(seed)
    each = min(each, num_groups)
    memberships = in_groups(routings, 7, num_groups, each)
    numbers = numbers_of(memberships, num_groups, each)
    assert numbers.shape == (2, routings * each, 7) and numbers.dtype == torch.int64
    assert torch.equal(memberships_of(numbers, num_groups, each), memberships)


PATTERNS = st.builds(
    Pattern, local_window=st.integers(0, 12), sink_tokens=st.just(2), dense_below=st.sampled_from([0, 6, EVERYTHING])
)


@given(data=st.data(), seed=st.integers(0, 99), length=st.integers(1, 40), num_groups=st.sampled_from([1, 3, 8]))
def test_each_head_attends_as_the_definition_has_it(data, seed, length, num_groups):
    """Some heads read groups of their own, the others have none."""
    torch.manual_seed(seed)
    patterns = data.draw(st.lists(PATTERNS, min_size=1, max_size=4))
    heads = tuple(sorted(data.draw(st.sets(st.integers(0, len(patterns) - 1), min_size=1))))
    query = torch.randn(2, 2 * len(patterns), 1, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, len(patterns), length, 8, dtype=torch.float64)
    memberships = in_groups(len(heads), length, num_groups, 1)
    read = torch.rand(2, len(heads), num_groups) < 0.3
    scores = torch.zeros(read.shape).masked_fill(~read, float("-inf"))
    token = TokenByNumbers(numbers_of(memberships, num_groups, 1), scores, Windows(patterns, heads))
    output = attend_one_token(query, key, value, token, 0.3)
    positions = torch.arange(length).expand(2, length)
    for head, pattern in enumerate(patterns):
        own = memberships[..., :0]
        reads = own
        if head in heads:
            place = heads.index(head)
            own = memberships[..., place * num_groups : (place + 1) * num_groups]
            reads = torch.cat([torch.zeros_like(own[:, 1:]), read[:, place][:, None]], dim=1)
        who = WhoAttends(pattern, positions, own, reads=reads, known=Known(None, unpadded=True))
        mask = attended_pairs(who, slice(length - 1, length))
        queries = slice(2 * head, 2 * head + 2)
        keys = key[:, head : head + 1], value[:, head : head + 1]
        expected = masked_attention(query[:, queries], *keys, mask, Scores(0.3))
        torch.testing.assert_close(output[:, queries], expected)


def test_nothing_is_waited_for_and_batches_cost_the_same():
    counts = []
    for batch in (1, 8):
        numbers = torch.zeros(batch, 3, 50, dtype=torch.int64)
        token = TokenByNumbers(numbers, torch.zeros(batch, 3, 8), Windows([Pattern(4, 2)] * 3, (0, 1, 2)))
        query, key = torch.randn(batch, 6, 1, 8), torch.randn(batch, 3, 50, 8)
        attend_one_token(query, key, key, token, 1.0)  # what is made once
        with LaunchCounter() as counter:
            attend_one_token(query, key, key, token, 1.0)
        assert not counter.syncs
        counts.append(sum(counter.operations.values()))
    assert counts[0] == counts[1] <= 6
