"""Who attends to whom: the definition against itself read aloud, and the paper's routing as groups and reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import PADDING, Pattern, WhoAttends, attended_pairs, by_memberships, count_pairs
from focus_hf.attention.definition import dense_pairs, share_a_group, without_groups
from focus_hf.routing import sets
from tests.attention.cases import calls, general, make_call, shared, shared_who


def in_loops(who: WhoAttends, heads: int) -> torch.Tensor:
    """The definition read aloud, pair by pair."""
    pattern, num_queries = who.pattern, who.num_queries
    batch, kv_heads, length = who.key_groups.shape
    mask = torch.zeros(batch, heads, num_queries, length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            of, chooser = h * kv_heads // heads, h * who.reads.shape[1] // heads
            for qi in range(num_queries):
                place = length - num_queries + qi
                for ki in range(length):
                    i, j = who.positions[b, place].item(), who.positions[b, ki].item()
                    if PADDING in (i, j) or j > i:
                        continue
                    if who.documents is not None and who.documents[b, place] != who.documents[b, ki]:
                        continue
                    if who.extra_mask is not None and not who.extra_mask[b, h % who.extra_mask.shape[1], qi, ki]:
                        continue
                    near = i - j <= pattern.local_window or j < pattern.sink_tokens or i < pattern.dense_below
                    band, start = 0, 2 * max(1, pattern.local_window)
                    while band < pattern.num_bands - 1 and i - j > start:
                        band, start = band + 1, 2 * start
                    mask[b, h, qi, ki] = near or who.reads[b, chooser, qi, who.key_groups[b, of, ki].long(), band]
    return mask


@settings(max_examples=40, deadline=None)
@given(case=calls, routing=general, chunk=st.sampled_from([1.0, 0.4, 0.01]))
def test_attended_pairs_are_the_definition(case, routing, chunk):
    case = {**case, "length": min(case["length"], 30), "window": case["window"] % 7}
    problem, mask = make_call(case, routing, chunk)
    who, heads = problem.who, problem.query.shape[1]
    spelled_out = in_loops(who, heads)
    assert torch.equal(mask.repeat_interleave(heads // mask.shape[1], dim=1), spelled_out)
    rows, columns = slice(who.num_queries // 3, None), slice(case["length"] // 4, case["length"] - 1)
    assert torch.equal(attended_pairs(who, rows, columns), mask[:, :, rows, columns])
    if who.extra_mask is None:
        attended, possible = count_pairs(who, chunk=7)
        assert attended.tolist() == mask.sum(dim=(0, 2, 3)).tolist()
        assert possible == int(dense_pairs(who).sum())
        if who.first_position is not None:  # the oldest tokens of a row are gone
            later = replace(who, positions=who.positions + 3, first_position=3)
            assert count_pairs(later, chunk=7)[0].tolist() == attended_pairs(later).sum(dim=(0, 2, 3)).tolist()


@settings(max_examples=40, deadline=None)
@given(case=calls, routing=shared, chunk=st.sampled_from([1.0, 0.4, 0.01]))
def test_memberships_as_groups_and_reads_say_what_sharing_a_group_says(case, routing, chunk):
    problem, mask = make_call(case, routing, chunk)
    who = problem.who
    alone = attended_pairs(without_groups(who))
    members = who.memberships
    together = share_a_group(members[:, -who.num_queries :], members)[:, None]
    assert torch.equal(mask, alone | (dense_pairs(who) & together))


@pytest.mark.parametrize(("groups", "top_k"), [(1, 1), (8, 1), (8, 2), (5, 3), (4, 4), (64, 33)])
def test_numbers_of_sets_say_the_same_pairs_as_memberships(groups, top_k):
    torch.manual_seed(groups + top_k)
    members = torch.rand(2, 60, groups).argsort(-1) < top_k
    numbers = sets.set_numbers(members.int().topk(top_k).indices, groups)
    reads = sets.meeting(groups, top_k, members.device)[numbers[:, 20:]]
    positions = torch.arange(60).expand(2, -1)
    who = WhoAttends(Pattern(5, 2), positions, numbers[:, None], reads[:, None, ..., None])
    assert torch.equal(attended_pairs(who), attended_pairs(shared_who(Pattern(5, 2), positions, members, 40)))
    if 2 * top_k <= groups:
        assert torch.equal(sets.members(groups, top_k, members.device)[numbers], members)
    else:  # all sets meet, and count as one
        assert sets.count(groups, top_k) == 1 and not numbers.any()


def test_more_sets_than_a_byte_has_numbers():
    torch.manual_seed(0)
    members = torch.rand(1, 700, 12) < 0.5
    groups, reads = by_memberships(members, 3)
    assert groups.dtype == torch.int32 and groups.max() > 255
    who = WhoAttends(Pattern(0, 0), torch.arange(700)[None], groups, reads)
    expected = share_a_group(members[:, -3:], members) | torch.eye(700, dtype=torch.bool)[None, -3:]
    assert torch.equal(attended_pairs(who)[:, 0], expected & (torch.arange(700) <= torch.arange(697, 700)[:, None]))


def test_sinks_are_members_of_every_group():
    """Marking sinks as members of all groups and naming them in the pattern is the same."""
    members = torch.rand(1, 90, 4).argsort(-1) < 1
    marked = members.clone()
    marked[:, :3] = True
    positions = torch.arange(90)[None]
    named, as_members = shared_who(Pattern(6, 3), positions, members), shared_who(Pattern(6, 0), positions, marked)
    assert torch.equal(attended_pairs(named), attended_pairs(as_members))


def test_one_sequence_of_a_batch_is_a_batch_of_one():
    case = dict(seed=3, batch=3, kv_heads=2, repeat=2, length=40, head_dim=4, narrow_values=False, window=5, sinks=2)
    case |= dict(dense_below=0, padding="left", documents=True, sink_logits=False, token_major=False)
    routing = dict(groups=7, bands=3, share=0.1, choosers="key heads", extra_mask="each head")
    problem, mask = make_call(case, routing, 0.5)
    for row in range(3):
        assert torch.equal(attended_pairs(problem.who.sequence(row)), mask[row : row + 1])


def test_without_groups_only_window_and_sinks_remain():
    positions = torch.arange(50)[None]
    who = without_groups(shared_who(Pattern(6, 2), positions, torch.ones(1, 50, 3, dtype=torch.bool)))
    i, j = torch.arange(50)[:, None], torch.arange(50)
    assert torch.equal(attended_pairs(who)[0, 0], (j <= i) & ((i - j <= 6) | (j < 2)))
    assert torch.equal(attended_pairs(replace(who, memberships=None))[0, 0], attended_pairs(who)[0, 0])
