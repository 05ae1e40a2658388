"""Queries that read other groups than they belong to, and heads of a layer that attend in different ways."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import (
    EVERYTHING,
    PADDING,
    HeadClass,
    Known,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    attend_by_class,
    attend_one_query,
    attended_pairs,
    focus_attention,
    masked_focus_attention,
    pairs_by_head,
    read_classes,
    write_classes,
)
from focus_hf.attention.reader_blocks import Readers, calls, make_blocks
from focus_hf.attention.scratch import scratch


def one_hot(shape: tuple[int, ...], num_groups: int, count: int = 1) -> torch.Tensor:
    chosen = torch.rand(*shape, num_groups).topk(count, dim=-1).indices
    return torch.zeros(*shape, num_groups, dtype=torch.bool).scatter_(-1, chosen, True)


def make_problem(
    *,
    seed: int,
    batch: int,
    keys: int,
    queries: int,
    num_groups: int,
    top_k: int,
    pattern: Pattern,
    padding: str,
    documents: bool,
    unknown: int,
    kv_heads: int = 2,
    repeat: int = 2,
    columns: int = 1,
) -> Problem:
    torch.manual_seed(seed)
    query = torch.randn(batch, kv_heads * repeat, queries, 16, dtype=torch.float64)
    key, value = (torch.randn(batch, kv_heads, keys, 16, dtype=torch.float64) for _ in range(2))
    real = torch.ones(batch, keys, dtype=torch.bool)
    if padding == "left":
        real[0, : keys // 3] = False
    if padding == "scattered":
        real = torch.rand(batch, keys) > 0.2
    ids = None
    positions = torch.where(real, real.cumsum(-1) - 1, PADDING)
    if documents:
        ids = (torch.arange(keys) * 3 // keys).expand(batch, keys).contiguous()
        starts = torch.stack([(real & (ids < d)).sum(-1) for d in range(3)], dim=1).gather(1, ids)
        positions = torch.where(real, positions - starts, PADDING)
    memberships = torch.cat([one_hot((batch, keys), num_groups) for _ in range(columns)], dim=-1)
    memberships[:, :unknown] = True
    reads = torch.cat([one_hot((batch, keys), num_groups, top_k) for _ in range(columns)], dim=-1)
    reads[:, : keys - queries] = False
    who = WhoAttends(pattern, positions, memberships, ids, reads=reads)
    return Problem(query, key, value, who, Scores(0.25))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    keys=st.integers(2, 90),
    part=st.sampled_from([1.0, 0.5, 0.0]),
    num_groups=st.integers(1, 6),
    top_k=st.integers(1, 3),
    window=st.integers(0, 20),
    sinks=st.integers(0, 4),
    dense_below=st.sampled_from([0, 9, 40]),
    padding=st.sampled_from(["none", "left", "scattered"]),
    documents=st.booleans(),
    unknown=st.sampled_from([0, 5, 30]),
    logits=st.booleans(),
)
def test_lookup_is_the_definition(
    seed: int,
    batch: int,
    keys: int,
    part: float,
    num_groups: int,
    top_k: int,
    window: int,
    sinks: int,
    dense_below: int,
    padding: str,
    documents: bool,
    unknown: int,
    logits: bool,
) -> None:
    problem = make_problem(
        seed=seed,
        batch=batch,
        keys=keys,
        queries=max(1, int(keys * part)),
        num_groups=num_groups,
        top_k=min(top_k, num_groups),
        pattern=Pattern(window, sinks, dense_below),
        padding=padding,
        documents=documents and part == 1.0,
        unknown=unknown,
    )
    if logits:
        problem = replace(problem, scores=Scores(0.25, sink_logits=torch.randn(4, dtype=torch.float64)))
    expected = masked_focus_attention(problem)
    for path in ("lookup", "biased"):
        torch.testing.assert_close(focus_attention(problem, path=path), expected, rtol=1e-9, atol=1e-9)
    single = replace(problem, query=problem.query.float(), key=problem.key.float(), value=problem.value.float())
    torch.testing.assert_close(focus_attention(single).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["lookup", "biased"])
@pytest.mark.parametrize("queries", [1200, 700, 300])
@pytest.mark.parametrize("each", [1, None])
def test_blocks_of_queries_are_the_definition(
    path: str, queries: int, each: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More readers of one group than are handled together, and more queries than share a bias, in memory that held
    anything before."""
    problem = make_problem(
        seed=0, batch=1, keys=1200, queries=queries, num_groups=3, top_k=1, pattern=Pattern(5, 2), padding="none",
        documents=False, unknown=0,
    )  # fmt: skip
    problem = replace(problem, who=replace(problem.who, known=Known(each, unpadded=True, reads_each=each)))
    monkeypatch.setattr("focus_hf.attention.biased.MIN_QUERIES", 500)
    monkeypatch.setattr("focus_hf.attention.biased.BIAS_SIZE", 1)
    scratch("bias", 2**21, like=problem.query).fill_(float("nan"))
    expected = masked_focus_attention(problem)
    torch.testing.assert_close(focus_attention(problem, path=path), expected, rtol=1e-9, atol=1e-9)


def test_readers_in_many_calls_are_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries' readers merged at a time, few blocks in a call, few readers in a block."""
    monkeypatch.setattr("focus_hf.attention.lookup.READERS_SIZE", 1)
    monkeypatch.setattr("focus_hf.attention.reader_blocks.CALL_SIZE", 1)
    monkeypatch.setattr("focus_hf.attention.lookup.ROWS", 1)
    problem = make_problem(
        seed=3, batch=1, keys=700, queries=600, num_groups=5, top_k=3, pattern=Pattern(4, 2), padding="scattered",
        documents=False, unknown=0,
    )  # fmt: skip
    expected = masked_focus_attention(problem)
    torch.testing.assert_close(focus_attention(problem, path="lookup"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", ["lookup", "biased", "grouped"])
def test_memory_kept_from_inference_mode_serves_outside_of_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("focus_hf.attention.scratch._pieces", SimpleNamespace(by_name={}))
    problem = make_problem(
        seed=4, batch=1, keys=300, queries=300, num_groups=4, top_k=1, pattern=Pattern(4, 2), padding="none",
        documents=False, unknown=0,
    )  # fmt: skip
    if path == "grouped":
        problem = replace(problem, who=replace(problem.who, reads=None))
    with torch.inference_mode():
        expected = focus_attention(problem, path=path).clone()
    with torch.no_grad():
        assert torch.equal(focus_attention(problem, path=path), expected)


def test_blocks_of_readers_hold_each_once_and_little_else() -> None:
    torch.manual_seed(0)
    query, group = (torch.rand(300, 6) < 0.4).nonzero(as_tuple=True)
    readers = Readers(query, group, torch.randint(1, 50, query.shape))
    edges = torch.arange(0, 350, 50)
    blocks = make_blocks(readers, edges, size=16)
    found = blocks.readers.flatten()[blocks.slots]
    assert torch.equal(found, torch.arange(len(query)))
    assert blocks.num_keys == sorted(blocks.num_keys, reverse=True)
    for row, start, most in zip(blocks.readers, blocks.start, blocks.num_keys, strict=True):
        assert set(edges[readers.group[row]].tolist()) == {int(start)}
        assert int(readers.limits[row[-1]]) == most
    some = list(calls(blocks.num_keys, row_size=16))
    assert [i for part in some for i in range(part.start, part.stop)] == list(range(len(blocks.num_keys)))


def test_reading_ones_own_group_is_symmetric_routing() -> None:
    problem = make_problem(
        seed=1, batch=2, keys=60, queries=60, num_groups=4, top_k=1, pattern=Pattern(6, 2), padding="left",
        documents=False, unknown=0,
    )  # fmt: skip
    same = replace(problem, who=replace(problem.who, reads=problem.who.memberships))
    none = replace(problem, who=replace(problem.who, reads=None))
    assert torch.equal(attended_pairs(same.who), attended_pairs(none.who))
    torch.testing.assert_close(focus_attention(same), focus_attention(none), rtol=1e-9, atol=1e-9)


CLASSES = (
    HeadClass((1,), Pattern(3, 2)),
    HeadClass((0, 3), Pattern(7, 2), (slice(0, 4), slice(4, 8))),
    HeadClass((2,), Pattern(0, 0, EVERYTHING)),
)


@pytest.mark.parametrize("queries", [70, 20, 1])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_each_head_attends_as_its_class_says(queries: int, softcap: float | None) -> None:
    problem = make_problem(
        seed=2, batch=2, keys=70, queries=queries, num_groups=4, top_k=2, pattern=Pattern(), padding="left",
        documents=False, unknown=3, kv_heads=4, columns=2,
    )  # fmt: skip
    problem = replace(problem, scores=Scores(0.25, softcap=softcap))
    output = attend_by_class(problem, CLASSES)
    by_hand = {0: (Pattern(7, 2), slice(0, 4)), 1: (Pattern(3, 2), slice(0, 0)), 3: (Pattern(7, 2), slice(4, 8))}
    for head in range(4):
        alone = problem.select_heads([head])
        pattern, columns = by_hand.get(head, (Pattern(10**6, 0), slice(0, 0)))
        reads = problem.who.reads
        assert reads is not None
        who = replace(
            problem.who, pattern=pattern, memberships=problem.who.memberships[..., columns], reads=reads[..., columns]
        )
        expected = masked_focus_attention(replace(alone, who=who))
        torch.testing.assert_close(output[:, 2 * head : 2 * head + 2], expected, rtol=1e-9, atol=1e-9)


def test_classes_survive_being_written() -> None:
    assert read_classes(write_classes(CLASSES)) == CLASSES
    assert read_classes(write_classes(None)) is None


def test_pairs_are_counted_by_head() -> None:
    problem = make_problem(
        seed=3, batch=1, keys=40, queries=40, num_groups=4, top_k=1, pattern=Pattern(), padding="none",
        documents=False, unknown=0, kv_heads=4, columns=2,
    )  # fmt: skip
    counts = pairs_by_head(problem.who, CLASSES, chunk=16)
    assert counts[2] == 40 * 41 // 2
    who, reads = problem.who, problem.who.reads
    assert reads is not None
    mine = replace(who, pattern=Pattern(7, 2), memberships=who.memberships[..., 4:8], reads=reads[..., 4:8])
    assert counts[3] == attended_pairs(mine).sum()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    keys=st.integers(1, 60),
    num_groups=st.sampled_from([3, 8, 16]),
    sinks=st.integers(0, 3),
    dense_below=st.sampled_from([0, 40]),
    padding=st.sampled_from(["none", "left", "scattered"]),
    known=st.booleans(),
    own_reads=st.booleans(),
    shared=st.booleans(),
    scores=st.sampled_from(["plain", "logits", "softcap"]),
    extra_mask=st.booleans(),
)
def test_one_new_token_is_the_definition(
    seed: int,
    keys: int,
    num_groups: int,
    sinks: int,
    dense_below: int,
    padding: str,
    known: bool,
    own_reads: bool,
    shared: bool,
    scores: str,
    extra_mask: bool,
) -> None:
    """Heads of every kind in one call, against each class of heads for itself under explicit masks."""
    problem = make_problem(
        **{"seed": seed, "batch": 2, "keys": keys, "queries": 1, "num_groups": num_groups, "top_k": 2},
        **{
            "pattern": Pattern(1, 1),
            "padding": padding,
            "documents": False,
            "unknown": 3,
            "kv_heads": 5,
            "columns": 4,
        },
    )
    k = num_groups
    columns = (slice(k, 2 * k),) if shared else (slice(k, 2 * k), slice(3 * k, 4 * k))
    classes = (
        HeadClass((1, 4), Pattern(5, sinks, dense_below), columns),
        HeadClass((2,), Pattern(3, sinks, dense_below), (slice(2 * k, 3 * k),)),
        HeadClass((0,), Pattern(7, sinks, dense_below)),
        HeadClass((3,), Pattern(0, sinks, EVERYTHING)),
    )
    who = problem.who
    if padding == "none" and known:
        who = replace(who, known=Known(None, unpadded=True))
    if extra_mask:
        allowed = torch.rand(2, 10 if seed % 2 else 1, 1, keys) > 0.3
        who = replace(who, extra_mask=allowed)
    how = {"plain": Scores(0.25), "logits": Scores(0.25, sink_logits=torch.randn(10, dtype=torch.float64))}
    problem = replace(problem, who=who, scores=how.get(scores, Scores(0.25, softcap=3.0)))
    reads = None
    if own_reads:
        reads = who.reads[:, -1:]
    else:
        problem = replace(problem, who=replace(who, reads=None))
    expected = attend_by_class(problem, classes, path="masked")
    torch.testing.assert_close(attend_one_query(problem, classes, reads), expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    keys=st.integers(1, 80),
    first=st.integers(0, 9),
    pattern=st.builds(Pattern, st.integers(0, 30), st.integers(0, 6), st.sampled_from([0, 20, 60])),
    num_groups=st.sampled_from([0, 3, 8, 16]),
    is_known=st.booleans(),
)
def test_one_new_token_of_heads_that_attend_alike_is_the_definition(
    seed: int, keys: int, first: int, pattern: Pattern, num_groups: int, is_known: bool
) -> None:
    """Rows may start at a later position, as in a cache that has dropped the oldest tokens."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, 1, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 3, keys, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    groups = torch.rand(2, keys, num_groups, generator=generator) < 0.2
    positions = (torch.arange(keys) + first).expand(2, keys)
    known = Known(None, unpadded=True, first_position=first) if is_known else None
    problem = Problem(query, key, value, WhoAttends(pattern, positions, groups, known=known), Scores(0.3))
    with torch.inference_mode():  # what is kept from here serves outside of it
        inside = attend_one_query(problem)
    expected = masked_focus_attention(problem)
    torch.testing.assert_close(attend_one_query(problem), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(inside, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(focus_attention(problem), expected, rtol=1e-10, atol=1e-10)
