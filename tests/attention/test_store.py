"""The cache stored by groups: always the rows of one full call, whatever happens to it, on every way to read it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import (
    PADDING,
    GroupedStore,
    HeadRow,
    Pattern,
    Scores,
    TokensGone,
    WhoAttends,
    attend_store,
    attended_pairs,
    decode,
    kernel_named,
    masked_attention,
    store,
    takes,
)
from focus_hf.bench import LaunchCounter
from focus_hf.bench.stand_in import FlashStandIn

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(store, "PAGE", 4)
    monkeypatch.setattr(store, "SLACK", 3)


@dataclass
class Naive:
    """What a cache is without any structure: its columns, in order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    memberships: torch.Tensor
    real: torch.Tensor
    rows: int = field(init=False)

    def __post_init__(self):
        self.rows = self.real.shape[0]

    @property
    def positions(self):
        return torch.where(self.real, self.real.long().cumsum(-1) - 1, PADDING)

    def change(self, how):
        names = ("query", "key", "value", "memberships", "real")
        for name in names:
            setattr(self, name, how(getattr(self, name)))
        self.rows = self.real.shape[0]

    def append(self, generator, count, groups, top_k, padding, in_a_group):
        def randn(heads):
            return torch.randn(self.rows, count, heads, DIM, generator=generator, dtype=torch.float64)

        memberships = torch.rand(self.rows, count, groups, generator=generator).argsort(-1) < top_k
        memberships &= torch.rand(self.rows, count, 1, generator=generator) < in_a_group
        new = (
            randn(HEADS),
            randn(KV_HEADS),
            randn(KV_HEADS),
            memberships,
            torch.rand(self.rows, count, generator=generator) >= padding,
        )
        names = ("query", "key", "value", "memberships", "real")
        for name, more in zip(names, new, strict=True):
            setattr(self, name, torch.cat([getattr(self, name), more], dim=1))

    def attention(self, pattern, scores, count):
        """Of the last columns, by the definition."""
        mask = attended_pairs(WhoAttends(pattern, self.positions, self.memberships))
        q, k, v = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        return masked_attention(q, k, v, mask, scores)[:, :, self.real.shape[1] - count :]


def empty(rows, groups):
    def none(*shape):
        return torch.zeros(rows, 0, *shape, dtype=torch.float64)

    bools = torch.zeros(rows, 0, groups, dtype=torch.bool)
    return Naive(none(HEADS, DIM), none(KV_HEADS, DIM), none(KV_HEADS, DIM), bools, bools.any(-1))


KERNELS = {"row by row": kernel_named("cpu-flash"), "paged": FlashStandIn()}


class WithoutPages(FlashStandIn):
    """A device without the paged kernel: one call under a mask."""

    paged = None


KERNELS["under a mask"] = WithoutPages()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    groups=st.integers(1, 6),
    window=st.integers(0, 12),
    sinks=st.integers(0, 5),
    dense_below=st.sampled_from([0, 0, 5, 40]),
    padding=st.sampled_from([0.0, 0.0, 0.3]),
    in_a_group=st.sampled_from([1.0, 1.0, 0.6, 0.0]),
    how=st.sampled_from(sorted(KERNELS)),
    plan_queries=st.sampled_from([4, 64]),
    logits=st.booleans(),
    device_pages=st.sampled_from([None, None, 1, 3, 50]),
    data=st.data(),
)
def test_it_attends_like_the_whole_sequence(
    seed, rows, groups, window, sinks, dense_below, padding, in_a_group, how, plan_queries, logits, device_pages, data
):
    """Tokens and chunks arrive, columns are cropped, rows are reordered and repeated, copies go on.

    All pages may be on the device or in host memory, however few of them the device has room for.
    """
    generator, kernel = torch.Generator().manual_seed(seed), KERNELS[how]
    top_k = data.draw(st.integers(1, groups))
    groups_each = top_k if in_a_group == 1.0 and data.draw(st.booleans()) else None
    sink_logits = torch.randn(HEADS, generator=generator).double() if logits else None
    pattern, scores, naive = (
        Pattern(window, sinks, dense_below),
        Scores(0.4, sink_logits=sink_logits),
        empty(rows, groups),
    )
    like = tuple(x.transpose(1, 2) for x in (naive.key, naive.value))
    stored = GroupedStore(pattern, groups, groups_each, like, device_pages and 4 * device_pages)
    before, decode.PLAN_QUERIES = decode.PLAN_QUERIES, plan_queries
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            step = data.draw(st.sampled_from(["append"] * 6 + ["crop", "select", "copy"]))
            seen = naive.real.shape[1]
            if step == "append":
                count = data.draw(st.sampled_from([1, 1, 1, 2, 5, 30]))
                naive.append(generator, count, groups, top_k, padding, in_a_group)
                new = slice(seen, seen + count)
                q, k, v = (x[:, new].transpose(1, 2) for x in (naive.query, naive.key, naive.value))
                arguments = naive.positions, naive.memberships[:, new]
                if not takes(stored, count, kernel):
                    stored.append(k, v, stored.pack(arguments[1]), arguments[0], groups_each)
                    continue
                output = attend_store(stored, q, k, v, *arguments, scores, kernel, groups_each)
                expected = naive.attention(pattern, scores, count)
                expected = expected.masked_fill(~naive.real[:, None, new, None], 0.0)
                torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
            elif step == "crop" and seen:
                count = data.draw(st.integers(1, seen))
                stored.crop(count)
                naive.change(lambda x, stop=seen - count: x[:, :stop])
            elif step == "select":
                chosen = torch.tensor(data.draw(st.lists(st.integers(0, naive.rows - 1), min_size=1, max_size=4)))
                stored.select(chosen)
                naive.change(lambda x, index=chosen: x[index])
            elif step == "copy":
                stored = copy.deepcopy(stored)
    finally:
        decode.PLAN_QUERIES = before
    keys, values, memberships = stored.restore()
    real = naive.real
    assert torch.equal(keys.transpose(1, 2)[real], naive.key[real])
    assert torch.equal(values.transpose(1, 2)[real], naive.value[real])
    assert torch.equal(memberships[real], naive.memberships[real]) and memberships[~real].all()
    assert not keys.transpose(1, 2)[~real].any()
    in_lists = (naive.real.sum(dim=-1) - window - sinks).clamp(min=0)
    assert (stored.pool.lengths.sum(dim=-1) <= in_lists).all()  # none twice


def filled(length, *, rows=2, groups=8, top_k=1, window=16, heads=KV_HEADS, dim=DIM, device_tokens=None):
    memberships = torch.rand(rows, length, groups).argsort(-1) < top_k
    keys = torch.randn(rows, heads, length, dim)
    stored = GroupedStore(Pattern(window, 4), groups, top_k, (keys, keys), device_tokens)
    stored.append(keys, keys, stored.pack(memberships), torch.arange(length).expand(rows, -1), top_k)
    return stored


@pytest.mark.parametrize("top_k", [1, 2])
def test_each_token_is_stored_once(monkeypatch, top_k):
    """However long it grows, the pool has room for its tokens, a quarter more, and a few pages."""
    monkeypatch.setattr(store, "PAGE", 16)
    stored, per_token = filled(1000, top_k=top_k), 2 * KV_HEADS * DIM * 4
    for length in range(1001, 3001):
        one = torch.randn(2, KV_HEADS, 1, DIM)
        codes = stored.pack(torch.rand(2, 1, 8).argsort(-1) < top_k)
        stored.append(one, one, codes, torch.arange(length).expand(2, -1), top_k)
        if length in (1001, 2000, 3000):
            pool = stored.pool.keys.nbytes + stored.pool.values.nbytes
            lists = len(stored.pool.list_codes)
            assert 2 * length * per_token <= pool <= 2 * (1.27 * length + 2.5 * 16 * lists + 100) * per_token
            assert stored.pool.lengths.sum(dim=-1).min() >= length - 4 - 16 - stored.spare
    stretches = [part for _, parts in stored.pool.runs(0) for part in parts]
    assert len(stretches) <= 2 * lists  # and a list is read in one or two


def test_nothing_is_asked_and_as_much_is_done_in_any_batch():
    counts = []
    for rows in (2, 7):
        stored, done = filled(100, rows=rows), []
        for length in range(101, 140):
            one = torch.randn(rows, KV_HEADS, 1, DIM)
            with LaunchCounter() as counter:
                codes = stored.pack(torch.ones(rows, 1, 8, dtype=torch.bool) & (torch.arange(8) == 3))
                stored.append(one, one, codes, torch.arange(length).expand(rows, -1), 1)
            assert not counter.syncs, counter.syncs
            done.append(counter.operations.total())
        for change in (lambda s=stored: s.crop(30), lambda s=stored, n=rows: s.select(torch.arange(n).flip(0))):
            with LaunchCounter() as counter:
                change()
            assert not counter.syncs, counter.syncs
            done.append(counter.operations.total())
        counts.append(done)
    assert counts[0] == counts[1]


def test_a_device_with_room_for_all_pages_fetches_each_once():
    """Tokens that come to a page which the device has are written there, too."""
    stored, kernel = filled(100, device_tokens=800), KERNELS["paged"]
    for length in range(101, 300):
        one = torch.randn(2, KV_HEADS, 1, DIM)
        memberships, positions = torch.rand(2, 1, 8).argsort(-1) < 1, torch.arange(length).expand(2, -1)
        attend_store(stored, one.repeat(1, 2, 1, 1), one, one, positions, memberships, Scores(0.4), kernel, 1)
    pages = ((stored.pool.lengths + 3) // 4).sum()
    assert 0.9 * pages <= stored.pool.books.misses <= pages < stored.pool.books.hits


#: Heads of a sequence that are rows of their own: groups with their windows, a window only, everything.
HEAD_ROWS = (HeadRow(6), HeadRow(3, forgets=True), HeadRow(0, everything=True), HeadRow(2), HeadRow(5, forgets=True))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    heads=st.lists(st.sampled_from(HEAD_ROWS), min_size=1, max_size=3),
    dense_below=st.sampled_from([0, 9]),
    groups=st.sampled_from([1, 3, 40, 64]),
    padding=st.sampled_from([0.0, 0.3]),
    unknown=st.sampled_from([0.0, 0.0, 0.1]),
    how=st.sampled_from(sorted(KERNELS)),
    looks=st.booleans(),
    device_pages=st.sampled_from([None, None, 2, 50]),
    data=st.data(),
)
def test_heads_that_attend_in_different_ways(
    seed, heads, dense_below, groups, padding, unknown, how, looks, device_pages, data
):
    """Each key/value head is a row: its groups as a key, those that it reads, its window, and what it lets go."""
    generator, kernel, sinks, rows = torch.Generator().manual_seed(seed), KERNELS[how], 2, 2
    counts, like = len(heads), torch.zeros(rows * len(heads), 1, 0, DIM, dtype=torch.float64)
    each = 1 if not unknown and data.draw(st.booleans()) else None
    room = device_pages and 4 * device_pages
    stored = GroupedStore(Pattern(0, sinks, dense_below), groups, each, (like, like), room, tuple(heads), looks)

    def randn(count, number):
        return torch.randn(rows, number, count, DIM, generator=generator, dtype=torch.float64)

    q, k, v = randn(0, 2 * counts), randn(0, counts), randn(0, counts)
    member = torch.zeros(rows, counts, 0, groups, dtype=torch.bool)
    read, real = member.clone(), torch.zeros(rows, 0, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 10))):
        step, seen = data.draw(st.sampled_from(["append"] * 6 + ["crop", "select", "copy"])), real.shape[1]
        if step == "append":
            count = data.draw(st.sampled_from([1, 1, 1, 2, 3, 30]))
            rows = real.shape[0]
            new = [torch.rand(rows, counts, count, groups, generator=generator).argsort(-1) < n for n in (1, 2)]
            new[0] |= torch.rand(rows, counts, count, 1, generator=generator) < unknown
            for x in new:
                for place, head in enumerate(heads):
                    if head.forgets or head.everything:
                        x[:, place] = head.everything
            here = torch.rand(rows, count, generator=generator) >= padding
            q, k, v = (torch.cat([x, randn(count, x.shape[1])], dim=2) for x in (q, k, v))
            member, read = (torch.cat([x, more], dim=2) for x, more in zip((member, read), new, strict=True))
            real = torch.cat([real, here], dim=1)
            positions = torch.where(real, real.long().cumsum(-1) - 1, PADDING)
            last = slice(seen, seen + count)
            groups_of, reads = (x[:, :, last].flatten(0, 1) for x in (member, read))
            if not takes(stored, count, kernel):
                own = (x[:, :, last].flatten(0, 1)[:, None] for x in (k, v))
                stored.append(*own, stored.pack(groups_of), positions, each)
                continue
            tensors = (x[:, :, last] for x in (q, k, v))
            output = attend_store(stored, *tensors, positions, groups_of, Scores(0.4), kernel, each, reads)
            for place, head in enumerate(heads):
                pattern = Pattern(head.local_window, sinks, dense_below)
                who = WhoAttends(pattern, positions, member[:, place], reads=read[:, place])
                own = (x[:, 2 * place : 2 * place + 2] if x is q else x[:, place : place + 1] for x in (q, k, v))
                expected = masked_attention(*own, attended_pairs(who), Scores(0.4))[:, :, last]
                expected = expected.masked_fill(~here[:, None, :, None], 0.0)
                found = output[:, 2 * place : 2 * place + 2]
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        elif step == "crop" and seen:
            count = data.draw(st.integers(1, seen))
            try:
                stored.crop(count)
            except TokensGone:
                continue
            q, k, v, member, read = (x[:, :, : seen - count] for x in (q, k, v, member, read))
            real = real[:, : seen - count]
        elif step == "select":
            chosen = torch.tensor(data.draw(st.lists(st.integers(0, real.shape[0] - 1), min_size=1, max_size=3)))
            stored.select(chosen)
            q, k, v, member, read, real = (x[chosen] for x in (q, k, v, member, read, real))
        elif step == "copy":
            stored = copy.deepcopy(stored)
    keys, values, memberships = (x.unflatten(0, (real.shape[0], counts)) for x in stored.restore())
    for place, head in enumerate(heads):
        if not head.forgets:
            assert torch.equal(keys[:, place, 0][real], k[:, place][real])
            assert torch.equal(values[:, place, 0][real], v[:, place][real])
            assert torch.equal(memberships[:, place][real], member[:, place][real])


def by_head(length, heads, *, groups=8, looks=False, sequences=2):
    """A store in which each head is a row, filled."""
    rows = sequences * len(heads)
    memberships, keys = torch.rand(rows, length, groups).argsort(-1) < 1, torch.randn(rows, 1, length, DIM)
    stored = GroupedStore(Pattern(0, 4), groups, 1, (keys, keys), None, heads, looks)
    stored.append(keys, keys, stored.pack(memberships), torch.arange(length).expand(sequences, -1), 1)
    return stored


def test_a_head_with_a_window_only_keeps_no_more():
    keeps, forgets = HeadRow(16), HeadRow(16, forgets=True)
    both, one, none = (
        by_head(2000, heads).num_bytes() for heads in ((keeps, keeps), (keeps, forgets), (forgets,) * 2)
    )
    assert one < 0.55 * both and none < 0.05 * both
    assert by_head(4000, (forgets,) * 2).num_bytes() - none == 2 * 2000 * 8  # positions of columns


@pytest.mark.parametrize("count", [64, 65])
def test_what_a_head_let_go_does_not_come_back(monkeypatch, count):
    monkeypatch.setattr(store, "SLACK", 64)
    stored = by_head(500, (HeadRow(16), HeadRow(7, forgets=True)))
    assert stored.tokens_gone and stored.spare >= 64
    count += stored.spare - 64
    if count > stored.spare:
        with pytest.raises(TokensGone, match=f"cannot be cropped by {count} tokens"):
            stored.crop(count)
    else:
        stored.crop(count)
    assert stored.columns.shape[1] == 500 - (count if count <= stored.spare else 0)


def test_many_lists_take_little_more_than_their_tokens(monkeypatch):
    monkeypatch.setattr(store, "PAGE", 64)
    stored = by_head(4000, (HeadRow(128),) * 2, groups=64, looks=True)
    plain = 4 * 4000 * 2 * DIM * 4
    assert stored.pool.keys.nbytes + stored.pool.values.nbytes <= 1.12 * plain
