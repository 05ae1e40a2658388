"""Random calls of the Triton kernels of decoding and prompts, compared with the definition in float64.

Run apart, interpreted (see `triton_apart`), or on a GPU (tests/gpu). What is not to be read is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from focus_hf.attention import Scores, prompt_tokens, prompts_in_place
from focus_hf.attention.definition import Pattern, WhoAttends, attended_pairs
from focus_hf.attention.kernels import triton_gather, triton_prompt, triton_sizes
from focus_hf.attention.kernels.triton_gather import sparse_decode
from focus_hf.attention.kernels.triton_prompt import PromptTokens, sparse_prompt

#: Where kernels run; what is compared with stays on the CPU.
DEVICE = "cpu"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "padding", "static", "blocks")

#: What a case may be; a step takes the interpreter as long whatever its size, so steps are few.
CASES: dict[str, st.SearchStrategy[Any]] = {
    "layout": st.sampled_from(LAYOUTS),
    "batch": st.integers(1, 3),
    "kv_heads": st.integers(1, 2),
    "heads_each": st.sampled_from((1, 2, 3, 4, 7, 8)),
    "dim": st.sampled_from((16, 24, 64)),
    "dtype": st.sampled_from(DTYPES),
    "num_groups": st.sampled_from((8, 13, 64, 256)),
    "bands": st.integers(1, 6),
    "window": st.sampled_from((0, 1, 5, 16)),
    "sinks": st.sampled_from((0, 1, 4)),
    "dense_below": st.sampled_from((0, 0, 20)),
    "share": st.sampled_from((0.0, 0.1, 0.5)),
    "length": st.integers(2, 90),
    "seed": st.integers(0, 10**6),
    "with_sink_logits": st.booleans(),
    "each_query_head": st.booleans(),
}

SLOW = settings(
    deadline=None,
    max_examples=12,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def dots_of_bfloat16() -> None:
    """Triton's interpreter (3.9) keeps bfloat16 as integers, and multiplies these: widen them first."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    narrow = InterpreterBuilder.create_dot

    def wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return narrow(self, a, b, *rest)

    InterpreterBuilder.create_dot = wide


def small_steps() -> None:
    """So that short sequences take several chunks, splits, segments and tiles."""
    triton_gather.STEP, triton_gather.MAX_CHUNKS = 16, 4
    triton_sizes.SPLIT_BOUND, triton_sizes.KEYS = 32, 16
    triton_prompt.STEP, triton_prompt.SEGMENT = 16, 32


def put(*tensors: Tensor) -> tuple[Tensor, ...]:
    """To where kernels run, strides as they are."""
    return tuple(x.to(DEVICE) for x in tensors)


class Call:
    """Tensors of a random call.

    Attributes:
        positions: ``(B, S)``.
        kept: keyword arguments that both kernels take.
    """

    def __init__(self, queries: int, **case: Any) -> None:
        torch.manual_seed(case["seed"])
        batch, kv_heads, dim, length = (case[name] for name in ("batch", "kv_heads", "dim", "length"))
        self.case, self.queries = case, queries
        heads, dtype = kv_heads * case["heads_each"], case["dtype"]
        self.query = torch.randn(batch, heads, queries, dim).to(dtype)
        self.key, self.value = (torch.randn(batch, kv_heads, length, dim).to(dtype) for _ in range(2))
        groups, bands = case["num_groups"], case["bands"]
        self.key_groups = torch.randint(groups, (batch, kv_heads, length), dtype=torch.uint8)
        choosers = heads if case["each_query_head"] else kv_heads
        self.reads = torch.rand(batch, choosers, queries, groups, bands) < case["share"]
        self.positions = torch.arange(length).repeat(batch, 1)
        if case["layout"] == "padding":
            some = torch.rand(batch, length) < 0.7
            self.positions = torch.where(some, some.cumsum(1) - 1, -1)
        self.pattern = Pattern(case["window"], case["sinks"], case["dense_below"], bands)
        self.sink_logits = torch.randn(heads) if case["with_sink_logits"] else None
        self.kept = {
            "scale": 0.3,
            "local_window": case["window"],
            "sink_tokens": case["sinks"],
            "dense_below": case["dense_below"],
            "sink_logits": None if self.sink_logits is None else self.sink_logits.to(DEVICE),
        }

    def blocks(self, cuts: Sequence[int] = (0, 0, 0), size: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, groups in blocks as vLLM keeps them, seen as kernels want them, and the table; each sequence
        without its last ``cuts`` tokens."""
        batch, kv_heads, length, dim = self.key.shape
        most = -(-length // size) + 1
        table = torch.randperm(batch * most + 2)[: batch * most].view(batch, most).int()
        found = []
        for x in (self.key, self.value, self.key_groups[..., None]):
            empty = float("nan") if x.dtype.is_floating_point else 0
            pool = x.new_full(((batch * most + 2) * size, kv_heads, x.shape[3]), empty)
            for row in range(batch):
                slots = (table[row].long()[:, None] * size + torch.arange(size)).flatten()
                pool[slots[: length - cuts[row]]] = x[row, :, : length - cuts[row]].transpose(0, 1)
            found.append(pool.unflatten(0, (-1, size)).transpose(1, 2))
        return found[0], found[1], found[2][..., 0], table

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output and logsumexp in float64, and the output of dense attention under a mask in the call's dtype."""
        each = self.case["heads_each"]
        pairs = attended_pairs(WhoAttends(self.pattern, self.positions, self.key_groups, self.reads))
        pairs = pairs.repeat_interleave(self.query.shape[1] // pairs.shape[1], dim=1)
        key, value = (x.repeat_interleave(each, dim=1) for x in (self.key, self.value))
        scores = (self.query.double() @ key.double().transpose(-1, -2) * 0.3).masked_fill(~pairs, -torch.inf)
        more = [] if self.sink_logits is None else [self.sink_logits.double()[None, :, None].expand(scores.shape[:3])]
        lse = torch.stack([scores.logsumexp(-1), *more]).logsumexp(0)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        dense = F.scaled_dot_product_attention(self.query, key, value, pairs, scale=0.3).nan_to_num(0.0)
        return weights @ value.double(), lse, dense.double()

    def compare(self, output: Tensor, lse: Tensor | None = None) -> None:
        """With what is expected: float32 to 1e-5; others to twice the error of dense attention, which has no sinks."""
        expected, expected_lse, dense = self.expected()
        output, lse = output.cpu(), None if lse is None else lse.cpu()
        asks = (self.positions[:, -self.queries :] >= 0)[:, None].expand(output.shape[:3])
        assert output.dtype == self.query.dtype and not output[~asks].any()
        error = (output.double() - expected)[asks].abs()
        allowed = 1e-5
        if output.dtype != torch.float32:
            own = 0.0 if self.sink_logits is not None else float((dense - expected).abs().max())
            allowed = max(2 * own, 2 * torch.finfo(output.dtype).eps)
        assert not error.numel() or float(error.max()) <= allowed * max(1.0, float(expected.abs().max())), self.case
        if lse is not None:
            some = asks & expected_lse.isfinite()
            assert bool((lse[~some] == -torch.inf).all())
            assert torch.allclose(lse[some].double(), expected_lse[some], atol=1e-4)


def decode(new: int, **case: Any) -> None:
    """New tokens against a cache of any layout."""
    new = min(new, case["length"])
    call = Call(new, **case)
    key, value, groups, extra = call.key, call.value, call.key_groups, {}
    if case["layout"] == "padding":
        extra = {"key_positions": call.positions}
    elif case["layout"] == "static":  # room behind the tokens, from another head
        key, value = (F.pad(x, (0, 0, 0, 9), value=float("nan")) for x in (key, value))
        groups = F.pad(groups, (0, 9))
    elif case["layout"] == "blocks":
        key, value, groups, table = call.blocks()
        extra = {"block_table": table}
    tensors = put(call.query, key, value, groups, call.reads, call.positions[:, -new:])
    call.compare(sparse_decode(*tensors, **call.kept, **{name: x.to(DEVICE) for name, x in extra.items()}))


def prompt(new: int, **case: Any) -> None:
    """Prompts, or later chunks: rows, rows with padding, or sequences of different lengths in blocks, packed."""
    new = min(new, case["length"])
    call = Call(new, **case)
    tensors = put(call.query, call.key, call.value, call.key_groups, call.reads)
    if case["layout"] == "padding":
        tokens = PromptTokens.from_positions(call.positions.to(DEVICE), new)
        call.compare(*sparse_prompt(*tensors, **call.kept, tokens=tokens))
    elif case["layout"] == "blocks":
        cuts = [7 * row % new for row in range(case["batch"])]
        key, value, groups, table = call.blocks(cuts)
        lengths = torch.tensor([case["length"] - cut for cut in cuts])
        starts = torch.tensor([0, *accumulate(new - cut for cut in cuts)])
        tokens = prompt_tokens(*put(table), 4, *put(lengths, starts), max(new - cut for cut in cuts))
        query, reads = (packed(x, cuts) for x in (call.query, call.reads))
        tensors = put(query, key, value, groups, reads)
        output = prompts_in_place(*tensors, tokens, call.pattern, Scores(0.3, sink_logits=call.kept["sink_logits"]))
        found = call.expected()[0].to(call.query.dtype)
        for row, cut in enumerate(cuts):
            found[row, :, : new - cut] = output[0, :, starts[row] : starts[row + 1]]
        call.compare(found)
    else:
        call.compare(*sparse_prompt(*tensors, **call.kept))


def packed(tensor: Tensor, cuts: list[int]) -> Tensor:
    """Of ``(B, heads, n, ...)`` each sequence's tokens but its last ``cut``, in one row ``(1, heads, T, ...)``."""
    rows = [row[:, : row.shape[1] - cut] for row, cut in zip(tensor, cuts, strict=True)]
    return torch.cat(rows, dim=1)[None]


def alike() -> None:
    """Heads that share groups and tables: stride 0."""
    case = {"layout": "plain", "batch": 2, "kv_heads": 1, "heads_each": 2, "dim": 16, "dtype": torch.float32}
    case |= {"num_groups": 8, "bands": 2, "window": 5, "sinks": 1, "dense_below": 0, "share": 0.3, "length": 40}
    call = Call(40, **case, seed=0, with_sink_logits=False, each_query_head=False)
    query, key, value = (x.repeat(1, 3, 1, 1) for x in (call.query, call.key, call.value))
    groups, reads = call.key_groups.expand(-1, 3, -1), call.reads.expand(-1, 3, -1, -1, -1)
    whole, _ = sparse_prompt(query, key, value, groups, reads, **call.kept)
    last = sparse_decode(
        *(query[:, :, -1:], key, value, groups, reads[:, :, -1:], call.positions[:, -1:]), **call.kept
    )
    for head in range(0, 6, 2):
        call.compare(whole[:, head : head + 2])
    assert torch.allclose(last, whole[:, :, -1:], atol=1e-6)


def routing() -> None:
    """Groups of keys and cells that queries read, beside plain torch; near an edge either side is right."""
    from focus_hf.attention.kernels import triton_routing
    from focus_hf.routing import cells

    torch.manual_seed(0)
    some = (1, 8, 16, 1, 1, torch.float32), (6, 13, 24, 3, 1, torch.float16), (6, 13, 24, 3, 3, torch.float16)
    for bands, groups, dim, each, parts, dtype in some:  # the query heads of a key head choose in so many parts
        kv_heads, codes = 2, 7
        choosers, width = kv_heads * parts, each * dim // parts
        shapes = (kv_heads, codes, dim), (kv_heads, groups, codes), (kv_heads, groups), (choosers, codes, width)
        shapes += (choosers, bands + 1, width), (choosers, groups * bands + 1), (choosers,)
        router = cells.CellRouter(*(0.3 * torch.randn(*shape) for shape in shapes))
        there = cells.CellRouter(*put(*router.tensors().values()))
        queries, keys = (torch.randn(2, 70, n, dim).to(dtype).transpose(1, 2) for n in (kv_heads * each, kv_heads))
        positions = torch.stack([torch.arange(70), torch.arange(70) * 3 - 1])
        dial = -6.0 + torch.rand(2, 70)
        for limits in (cells.cell_limits(positions, dial, 4, bands), cells.cell_limits(positions[:1], -6.0, 4, bands)):
            of_queries = *there.in_two_steps(torch.float32), there.offset
            found = triton_routing.cell_reads(*put(queries, limits), *of_queries).cpu()
            expected, a, b = (cells.cell_reads(queries, router, limits + x) for x in (0.0, 1e-3, -1e-3))
            assert 0.1 < expected.float().mean() < 0.9, expected.float().mean()
            assert torch.equal(found[a == b], expected[a == b])
        of_keys = there.key_projection, there.centroids, there.balance
        found = triton_routing.key_groups(*put(keys), *of_keys).cpu()
        scores = cells.key_scores(keys, router)
        assert found.dtype == torch.uint8 and found.unique().numel() > 3
        got = scores.gather(-1, found.long()[..., None])[..., 0]
        assert bool((got >= scores.amax(-1) - 1e-4).all())


def run(what: str) -> None:
    """Run one of the above over many cases; says so in JSON."""
    small_steps()
    dots_of_bfloat16()
    if what in ("alike", "routing"):
        {"alike": alike, "routing": routing}[what]()
    else:
        one = {"decode": decode, "prompt": prompt}[what]
        new = st.integers(1, 8) if what == "decode" else st.integers(1, 90)
        SLOW(given(new=new, **CASES)(one))()
    print(json.dumps("equal"))
