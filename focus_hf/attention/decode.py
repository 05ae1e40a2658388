"""Keys and values of a cached sequence, stored by groups, so that a new token reads only what it attends to.

A token enters among the *recent* ones. Once it is out of every later query's window it moves to the *slab* of its
set of groups, one contiguous and growing piece of memory per set; sinks stay where they are. A query reads the slabs
whose groups it shares and the recent tokens. Each token is stored once, and none is met twice.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .grouped import attend_parts
from .kernels import Call, Kernel
from .mask import Pattern, WhoAttends, attended_pairs
from .merge import Accumulator
from .plan import make_plan
from .rows import Rows

#: Tokens that may gather behind the window before they are moved to their slabs.
SLACK = 64

#: From this many queries on, the recent tokens are worth a plan of their own.
PLAN_QUERIES = 64

#: The code of a sink: every query attends to it, whatever its groups.
SINK = -1

#: Memberships are kept as bits of an int64.
MAX_GROUPS = 62


def pack_groups(memberships: Tensor) -> Tensor:
    """bool ``(..., K)`` to int64 codes ``(...)``, one bit per group."""
    return (memberships.long() << torch.arange(memberships.shape[-1], device=memberships.device)).sum(dim=-1)


def unpack_groups(codes: Tensor, num_groups: int) -> Tensor:
    """Codes ``(...)`` to bool ``(..., K)``; a sink is in every group."""
    return (codes[..., None] >> torch.arange(num_groups, device=codes.device)) & 1 > 0


class TokenList:
    """Keys, values and facts of some tokens, in order; grows at the end without copying each time."""

    def __init__(self, keys: Tensor, values: Tensor, facts: Tensor) -> None:
        """Start with these tokens: ``(H_kv, n, D)``, ``(H_kv, n, D_v)``, and ``(n, 3)`` column, position, code."""
        self._keys, self._values, self._facts = keys.contiguous(), values.contiguous(), facts
        self.length = facts.shape[0]

    @property
    def keys(self) -> Tensor:
        return self._keys[:, : self.length]

    @property
    def values(self) -> Tensor:
        return self._values[:, : self.length]

    @property
    def facts(self) -> Tensor:
        return self._facts[: self.length]

    @property
    def positions(self) -> Tensor:
        return self.facts[:, 1]

    def append(self, keys: Tensor, values: Tensor, facts: Tensor) -> None:
        length = self.length + facts.shape[0]
        if length > self._facts.shape[0]:
            capacity = length + max(length // 4, 64)
            self._keys = _grown(self.keys, capacity, 1)
            self._values = _grown(self.values, capacity, 1)
            self._facts = _grown(self.facts, capacity, 0)
        new = slice(self.length, length)
        self._keys[:, new], self._values[:, new], self._facts[new] = keys, values, facts
        self.length = length

    def part(self, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and facts of some tokens."""
        return self.keys[:, index], self.values[:, index], self.facts[index]


def _grown(tensor: Tensor, capacity: int, dim: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_empty(shape)
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown


class SequenceStore:
    """One cached sequence.

    Args:
        pattern: window, sinks, dense start.
        num_groups: ``K``, at most `MAX_GROUPS`.
    """

    def __init__(self, pattern: Pattern, num_groups: int) -> None:
        self.pattern = pattern
        self.num_groups = num_groups
        self.recent: TokenList | None = None
        self.slabs: dict[int, TokenList] = {}
        self.next_position = 0

    def append(self, keys: Tensor, values: Tensor, columns: Tensor, positions: Tensor, memberships: Tensor) -> None:
        """Add new tokens to the recent ones; `settle` when they have been attended.

        Args:
            keys: ``(H_kv, n, D)``.
            values: ``(H_kv, n, D_v)``.
            columns: ``(n,)``, where the tokens stand in the cache, padding included.
            positions: ``(n,)``, their ranks in the sequence, which count on from the last token.
            memberships: bool ``(n, K)``.
        """
        codes = pack_groups(memberships)
        if self.next_position < self.pattern.sink_tokens:
            codes = codes.masked_fill(positions < self.pattern.sink_tokens, SINK)
        facts = torch.stack([columns, positions, codes], dim=1)
        if self.recent is None:
            self.recent = TokenList(keys, values, facts)
        else:
            self.recent.append(keys, values, facts)
        self.next_position += facts.shape[0]

    def settle(self, slack: int | None = None) -> None:
        """Move tokens that no later query has in its window to their slabs, if more than ``slack`` have gathered.

        ``None`` stands for `SLACK`.
        """
        slack = SLACK if slack is None else slack
        if self.recent is None:
            return
        stop = self.recent.length - self.pattern.local_window
        start = min(self.pattern.sink_tokens, self.next_position)
        if stop - start <= slack:
            return
        keys, values, facts = self.recent.part(slice(start, stop))
        for code in facts[:, 2].unique().tolist():
            index = (facts[:, 2] == code).nonzero().squeeze(-1)
            tokens = keys.index_select(1, index), values.index_select(1, index), facts[index]
            if code in self.slabs:
                self.slabs[code].append(*tokens)
            else:
                self.slabs[code] = TokenList(*tokens)
        sinks, others = self.recent.part(slice(0, start)), self.recent.part(slice(stop, None))
        self.recent = TokenList(
            *(torch.cat(pair, dim) for pair, dim in zip(zip(sinks, others, strict=True), (1, 1, 0), strict=True))
        )

    def attend(self, query: Tensor, scale: float, kernel: Kernel) -> Accumulator:
        """Attention of the last ``Q`` tokens, which have been appended and not settled: ``(Q, H, D)``."""
        assert self.recent is not None
        num_queries = query.shape[0]
        if num_queries == 1:
            return self._attend_one(query, scale, kernel)
        whole = self._attend_recent(query, scale, kernel)
        facts = self.recent.facts[-num_queries:]
        positions, codes = facts[:, 1], facts[:, 2]
        for code, slab in self.slabs.items():
            index = ((codes & code != 0) | (positions < self.pattern.dense_below)).nonzero().squeeze(-1)
            if index.numel():
                whole.add(index, *_attend_all(query[index], slab, scale, kernel))
        return whole

    def _attend_one(self, query: Tensor, scale: float, kernel: Kernel) -> Accumulator:
        """`attend` for one token, where the time goes into the number of operations."""
        assert self.recent is not None
        facts = self.recent.facts
        code, position = int(facts[-1, 2]), self.next_position - 1
        everything = position < self.pattern.dense_below
        exclude = None
        if not everything and facts.shape[0] > self.pattern.local_window + 1:
            out_of_window = facts[:, 1] < position - self.pattern.local_window
            excluded = out_of_window & (facts[:, 2] & code == 0)
            if code == 0:  # a sink shares a bit with every other code
                excluded &= facts[:, 2] != SINK
            exclude = excluded.new_ones(1, 1), excluded[:, None]
        parts = [_attend_all(query, self.recent, scale, kernel, exclude)]
        for groups, slab in self.slabs.items():
            if everything or groups & code:
                parts.append(_attend_all(query, slab, scale, kernel))
        whole = Accumulator(1, query.shape[1], self.recent.values.shape[-1], query, every_query=True)
        whole.put_parts(parts)
        return whole

    def _attend_recent(self, query: Tensor, scale: float, kernel: Kernel) -> Accumulator:
        assert self.recent is not None
        num_queries = query.shape[0]
        memberships = unpack_groups(self.recent.facts[:, 2], self.num_groups)
        who = WhoAttends(self.pattern, self.recent.positions[None], memberships[None])
        k, v = self.recent.keys.transpose(0, 1), self.recent.values.transpose(0, 1)
        if num_queries >= PLAN_QUERIES:
            plan = make_plan(who, num_queries)
            return attend_parts(query, k, v, plan, scale, kernel)
        whole = Accumulator(num_queries, query.shape[1], v.shape[-1], query, every_query=True)
        pairs = attended_pairs(who, slice(self.recent.length - num_queries, None))
        whole.put(slice(0, num_queries), *_masked_with_lse(query, k, v, pairs[0, 0], scale))
        return whole

    def crop(self, columns: int) -> None:
        """Forget the tokens from this column on."""
        lists = [*self.slabs.values(), *([] if self.recent is None else [self.recent])]
        for tokens in lists:
            tokens.length = int(torch.searchsorted(tokens.facts[:, 0].contiguous(), columns))
        self.next_position = 1 + max((int(tokens.positions[-1]) for tokens in lists if tokens.length), default=-1)
        self._unsettle()

    def _unsettle(self) -> None:
        """Take tokens that are in the window again out of their slabs."""
        first = self.next_position - self.pattern.local_window
        returning = []
        for slab in self.slabs.values():
            stay = int(torch.searchsorted(slab.positions.contiguous(), first))
            returning.append(tuple(x.clone() for x in slab.part(slice(stay, None))))
            slab.length = stay
        if self.recent is not None:
            returning.append(self.recent.part(slice(0, None)))
        keys, values, facts = (
            torch.cat(parts, dim=dim) for parts, dim in zip(zip(*returning, strict=True), (1, 1, 0), strict=True)
        )
        order = facts[:, 1].argsort()  # sinks first: they were among the recent ones all along
        self.recent = TokenList(keys[:, order], values[:, order], facts[order])
        self.slabs = {code: slab for code, slab in self.slabs.items() if slab.length}

    def restore(self, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Every token in its column: keys ``(H_kv, S, D)``, values ``(H_kv, S, D_v)``, memberships bool ``(S, K)``.

        Columns without a token are padding; their memberships are as for any unknown token: all groups.
        """
        assert self.recent is not None
        keys, values = (
            x.new_zeros(x.shape[0], num_columns, x.shape[2]) for x in (self.recent.keys, self.recent.values)
        )
        memberships = torch.ones(num_columns, self.num_groups, dtype=torch.bool, device=keys.device)
        for tokens in (*self.slabs.values(), self.recent):
            columns = tokens.facts[:, 0]
            keys[:, columns], values[:, columns] = tokens.keys, tokens.values
            memberships[columns] = unpack_groups(tokens.facts[:, 2], self.num_groups)
        return keys, values, memberships

    def clone(self) -> SequenceStore:
        """A copy that shares no memory."""
        return copy.deepcopy(self)


def _attend_all(
    query: Tensor, tokens: TokenList, scale: float, kernel: Kernel, exclude: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Every query with every token, some of them excluded."""
    rows = Rows.single(query.shape[0], tokens.length, query.device)
    keys, values = tokens.keys.transpose(0, 1), tokens.values.transpose(0, 1)
    return kernel.forward(query, keys, values, Call(rows, scale, exclude=exclude, causal=False))


def _masked_with_lse(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of few queries over few keys, spelled out: ``(Q, H, D)``, ``(S, H_kv, D)``, bool ``(Q, S)``."""
    num_heads, kv_heads = query.shape[1], key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.unflatten(1, (kv_heads, num_heads // kv_heads)).to(dtype)
    scores = torch.einsum("qgrd,sgd->qgrs", q, key.to(dtype)) * scale
    scores = scores.masked_fill(~pairs[:, None, None], float("-inf"))
    lse = scores.logsumexp(dim=-1)
    output = torch.einsum("qgrs,sgd->qgrd", (scores - lse[..., None]).exp(), value.to(dtype))
    return output.flatten(1, 2), lse.flatten(1, 2)
