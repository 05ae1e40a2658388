"""The oracle of `studies.needle_parts`, against attention as it is defined."""

from __future__ import annotations

import pytest
import torch

from studies.needle_parts import oracle


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_oracle_reads_the_keys_with_most_weight(share: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    found, _ = oracle(share)(None, query, key, value, None, scaling=0.3)
    for head in range(4):
        for place in range(3):
            seen = 20 - 3 + place + 1
            weights = (query[0, head, place] @ key[0, head // 2, :seen].T * 0.3).softmax(dim=-1)
            best = weights.topk(min(seen, int(share * 20))).indices
            expected = weights[best] @ value[0, head // 2, best] / weights[best].sum()
            torch.testing.assert_close(found[0, place, head], expected)
