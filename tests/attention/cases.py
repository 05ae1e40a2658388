"""Calls of attention in which everything varies at once, and what they have to give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from focus_hf.attention import (
    PADDING,
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    attended_pairs,
    by_memberships,
    masked_attention,
)

calls = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 100_000),
        "batch": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "repeat": st.integers(1, 3),
        "length": st.integers(1, 150),
        "head_dim": st.sampled_from([4, 8, 24, 64]),
        "narrow_values": st.booleans(),
        "window": st.integers(0, 70),
        "sinks": st.integers(0, 9),
        "dense_below": st.sampled_from([0, 0, 5, 40, 200]),
        "padding": st.sampled_from(["none", "left", "right", "scattered"]),
        "documents": st.booleans(),
        "sink_logits": st.booleans(),
        "token_major": st.booleans(),
    }
)

#: Routing that all heads share.
shared = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 9),
        "share": st.floats(0, 1),
        "some_in_all_groups": st.booleans(),
        "in_no_group": st.sampled_from(["nobody", "nobody", "some", "all", "there are none"]),
    }
)

#: Any groups of keys and any reads.
general = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 256),
        "bands": st.integers(1, 6),
        "share": st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
        "choosers": st.sampled_from(["one", "key heads", "query heads"]),
        "extra_mask": st.sampled_from(["none", "none", "one", "each head"]),
    }
)


def make_call(case: dict[str, Any], routing: dict[str, Any], chunk: float = 1.0) -> tuple[Problem, Tensor]:
    """A problem in float32, and its mask by definition.

    Args:
        case: of `calls`.
        routing: of `shared` or `general`.
        chunk: the share of the tokens that are queries.
    """
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv_heads, length, dim = case["batch"], case["kv_heads"], case["length"], case["head_dim"]
    heads, queries = kv_heads * case["repeat"], max(1, round(chunk * length))

    def states(count: int, width: int) -> Tensor:
        made = torch.randn(batch, count, length, width, generator=generator)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if case["token_major"] else made

    query, key = states(heads, dim)[:, :, length - queries :], states(kv_heads, dim)
    value = states(kv_heads, max(1, dim // 2) if case["narrow_values"] else dim)
    positions, documents = make_positions(case["padding"], case["documents"], batch, length, generator)
    plain = case["padding"] == "none" and documents is None
    logits = torch.randn(heads, generator=generator) if case["sink_logits"] else None
    pattern = Pattern(case["window"], case["sinks"], case["dense_below"], routing.get("bands", 1))
    first = 0 if plain else None
    if "bands" in routing:
        groups, reads, extra = _any_reads(routing, batch, heads, kv_heads, queries, length, generator)
        who = WhoAttends(pattern, positions, groups, reads, documents, extra, first)
    else:
        who = shared_who(pattern, positions, _memberships(routing, batch, length, generator), queries, kv_heads)
        who = replace(who, documents=documents, first_position=first)
    problem = Problem(query, key, value, who, Scores(dim**-0.5, sink_logits=logits))
    return problem, attended_pairs(who)


def make_positions(
    padding: str, packed: bool, batch: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Positions, and documents where every sequence is cut into several."""
    real = torch.ones(batch, length, dtype=torch.bool)
    if padding == "left":
        real[0, : length // 3] = False
    elif padding == "right":
        real[-1, length - length // 3 :] = False
    elif padding == "scattered":
        real = torch.rand(batch, length, generator=generator) > 0.2
    if not packed:
        return torch.where(real, real.cumsum(-1) - 1, PADDING), None
    documents = (torch.rand(batch, length, generator=generator) < 0.05).cumsum(-1)
    positions = torch.full((batch, length), PADDING)
    for row in range(batch):
        for document in documents[row].unique():
            own = (documents[row] == document) & real[row]
            positions[row, own] = torch.arange(int(own.sum()))
    return positions, documents


def shared_who(
    pattern: Pattern, positions: Tensor, memberships: Tensor, queries: int | None = None, kv_heads: int = 1
) -> WhoAttends:
    """Who attends with a routing that all heads share; every token is a query unless ``queries`` says how many."""
    groups, reads = by_memberships(memberships, positions.shape[1] if queries is None else queries)
    groups, reads = groups.expand(-1, kv_heads, -1), reads.expand(-1, kv_heads, -1, -1, -1)
    return WhoAttends(pattern, positions, groups, reads, memberships=memberships)


def _memberships(routing: dict[str, Any], batch: int, length: int, generator: torch.Generator) -> Tensor:
    count = routing["groups"]
    found = torch.rand(batch, length, count, generator=generator).argsort(-1) < max(1, routing["share"] * count)
    if routing["some_in_all_groups"]:
        found |= torch.rand(batch, length, 1, generator=generator) < 0.1
    if routing["in_no_group"] == "some":
        found &= torch.rand(batch, length, 1, generator=generator) < 0.7
    elif routing["in_no_group"] == "all":
        found &= False
    return found[..., :0] if routing["in_no_group"] == "there are none" else found


def _any_reads(
    routing: dict[str, Any], batch: int, heads: int, kv_heads: int, queries: int, length: int, generator: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    own = {"one": 1, "key heads": kv_heads, "query heads": heads}[routing["choosers"]]
    groups = torch.randint(routing["groups"], (batch, min(own, kv_heads), length), generator=generator).to(torch.uint8)
    shape = batch, own, queries, routing["groups"], routing["bands"]
    reads = torch.rand(shape, generator=generator) < routing["share"]
    extra = None
    if routing["extra_mask"] != "none":
        of = 1 if routing["extra_mask"] == "one" else heads
        extra = torch.rand(batch, of, queries, length, generator=generator) > 0.3
    return groups.expand(-1, kv_heads, -1), reads.expand(-1, max(own, kv_heads), -1, -1, -1), extra


def in_doubles(problem: Problem) -> Problem:
    """The same problem in float64."""
    logits = problem.scores.sink_logits
    return replace(
        problem,
        query=problem.query.double(),
        key=problem.key.double(),
        value=problem.value.double(),
        scores=replace(problem.scores, sink_logits=None if logits is None else logits.double()),
    )


def expected_of(problem: Problem, mask: Tensor | None = None) -> Tensor:
    """What it has to give, in float64, under an explicit mask (the definition's)."""
    double = in_doubles(problem)
    mask = attended_pairs(problem.who) if mask is None else mask
    return masked_attention(double.query, double.key, double.value, mask, double.scores)


def relative_error(output: Tensor, expected: Tensor) -> float:
    return ((output.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()
