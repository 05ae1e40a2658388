"""One new token by the rows of groups is the definition, also where the rows do not know the last tokens."""

from __future__ import annotations

import pytest
import torch

from focus_hf.attention import (
    GroupRows,
    Known,
    Pattern,
    Scores,
    TokenByRows,
    WhoAttends,
    attend_one_token,
    attended_pairs,
    masked_attention,
    numbers_of,
)
from focus_hf.bench.counting import LaunchCounter


def in_groups(batch: int, length: int, num_groups: int, each: int) -> torch.Tensor:
    return torch.rand(batch, length, num_groups).argsort(-1) < each


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("window, sinks", [(0, 0), (3, 2), (50, 4)])
@pytest.mark.parametrize("length", [1, 5, 30])
def test_any_token_that_there_is_room_for(batch: int, each: int, window: int, sinks: int, length: int) -> None:
    torch.manual_seed(0)
    longest, pattern = length + window + 1, Pattern(window, sinks)
    memberships = in_groups(batch, longest, 6, each)
    numbers = numbers_of(memberships, 6, each)
    rows = GroupRows(numbers[..., :length], 6, pattern)
    assert rows.longest == longest
    query = torch.randn(batch, 6, 1, 8, dtype=torch.float64)
    key, value = torch.randn(2, batch, 3, longest, 8, dtype=torch.float64)
    for total in range(length + 1, longest + 1):
        token = TokenByRows(rows, numbers[..., total - 1], total)
        assert (token.length, token.num_groups) == (total, 6)
        output = attend_one_token(query, key[:, :, :total], value[:, :, :total], token, 0.3)
        known = Known(each, unpadded=True)
        who = WhoAttends(pattern, torch.arange(total).expand(batch, total), memberships[:, :total], known=known)
        mask = attended_pairs(who, slice(total - 1, total))
        expected = masked_attention(query, key[:, :, :total], value[:, :, :total], mask, Scores(0.3))
        torch.testing.assert_close(output, expected)


def test_nothing_is_waited_for_and_batches_cost_the_same() -> None:
    counts = []
    for batch in (1, 8):
        rows = GroupRows(torch.zeros(batch, 1, 50, dtype=torch.int64), 4, Pattern(4, 2))
        token = TokenByRows(rows, torch.zeros(batch, 1, dtype=torch.int64), 51)
        query, key = torch.randn(batch, 6, 1, 8), torch.randn(batch, 3, 51, 8)
        with LaunchCounter() as counter:
            attend_one_token(query, key, key, token, 1.0)
        assert not counter.syncs
        counts.append(sum(counter.operations.values()))
    assert counts[0] == counts[1] <= 5, counts
