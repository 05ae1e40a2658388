"""Single queries over gathered keys are the definition."""

from __future__ import annotations

import pytest
import torch

from focus_hf.attention import PADDING, Pattern, Scores, WhoAttends, attended_pairs, gather_index, gathered_attention
from focus_hf.attention.masked import masked_attention


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_is_the_definition(softcap: float | None, logits: bool, kv_heads: int) -> None:
    """Sequences of 40, 17, 3 and 1 keys, aligned at the right, whose last token asks; and one of padding alone."""
    generator = torch.Generator().manual_seed(0)
    lengths, longest, heads, dim = (40, 17, 3, 1, 0), 40, 4, 8
    query, key, value = (
        torch.randn(len(lengths), count, length, dim, generator=generator, dtype=torch.float64)
        for count, length in ((heads, 1), (kv_heads, longest), (kv_heads, longest))
    )
    positions = torch.arange(longest) - longest + torch.tensor(lengths)[:, None]
    memberships = torch.rand(len(lengths), longest, 4, generator=generator) < 0.3
    who = WhoAttends(Pattern(5, 2), positions.where(positions >= 0, PADDING), memberships)
    scores = Scores(dim**-0.5, softcap, torch.randn(heads, generator=generator).double() if logits else None)
    pairs = attended_pairs(who, slice(-1, None))
    expected = masked_attention(query, key, value, pairs, scores)[:, :, 0]

    index, real = gather_index(pairs[:, 0, 0])
    assert index.shape[1] == int(pairs.sum(dim=-1).max()) < longest
    rows = index[:, None, :, None].expand(-1, kv_heads, -1, dim)
    found = gathered_attention(query[:, :, 0], key.gather(2, rows), value.gather(2, rows), real, scores)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not found[-1].any()
