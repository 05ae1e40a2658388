"""Attention alone: prefill and decoding, against the fastest dense attention of the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import (
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    count_pairs,
    find_kernel,
    focus_attention,
    kernel_named,
    of_all_heads,
)
from ..attention.kernels import Kernel
from ..attention.paths import choose_path
from ..attention.prompt import make_plan
from ..routing import sets
from .settings import Measurement, Setting
from .timing import interleaved, step_shares

#: Dense backends tried on CUDA, by name.
_CUDA_BACKENDS = {
    "flash SDPA": SDPBackend.FLASH_ATTENTION,
    "cuDNN SDPA": SDPBackend.CUDNN_ATTENTION,
    "efficient SDPA": SDPBackend.EFFICIENT_ATTENTION,
}


@torch.no_grad()
def bench_attention(setting: Setting, seconds: float = 5.0) -> Measurement:
    """Prefill of one sequence, in the layout in which transformers passes queries, keys and values."""
    problem = random_problem(setting)
    query, key, value = problem.query, problem.key, problem.value
    kernel = _kernel(setting, query, value)

    focus = partial(focus_attention, problem, kernel=kernel)
    denses = dense_functions(query, key, value, causal=True)
    times = interleaved({**denses, "focus": focus}, setting.device, seconds)
    baseline = min(denses, key=lambda name: times[name])
    attended, possible = count_pairs(problem.who)
    path = choose_path(problem)
    computed = None if path != "grouped" else sum(part.computed_pairs() for part in make_plan(problem)) / possible
    return Measurement(
        "attention",
        setting,
        times[baseline],
        times["focus"],
        limit=possible * attended.shape[0] / int(attended.sum()),
        computed=computed,
        baseline=baseline,
        path=f"{path}, {kernel.name}" if path == "grouped" else path,
        shares=step_shares(focus),
    )


@torch.no_grad()
def bench_decode(setting: Setting, seconds: float = 3.0) -> Measurement:
    """One new token against a cache of ``length`` tokens as a model stores it; queries of random groups.

    What routes the token, and its coming to the cache, is part of neither. As in a model, layers take turns, so that
    keys come from memory and not from a processor's cache, where the last call on them would have left them.
    """
    problem = random_problem(setting, 1)
    query, kernel = problem.query, _kernel(setting, problem.query, problem.value)
    layers: list[dict[str, Callable[[], Tensor]]] = []
    for _ in range(max(1, TURN_BYTES // (2 * problem.key.nbytes))):
        key, value = (x.clone(memory_format=torch.contiguous_format) for x in (problem.key, problem.value))
        focus = partial(focus_attention, replace(problem, key=key, value=value), kernel=kernel)
        layers.append({**dense_functions(query, key, value, causal=False), "focus": focus})
    turns = {name: _next_of([layer[name] for layer in layers]) for name in layers[0]}
    times = interleaved(turns, setting.device, seconds, least=40, most=200)
    baseline = min((name for name in times if name != "focus"), key=lambda name: times[name])
    return Measurement(
        "decode",
        setting,
        times[baseline],
        times["focus"],
        limit=_decode_limit(setting, problem.who),
        baseline=baseline,
        path=choose_path(problem),
    )


#: Keys and values of the layers that take turns, in bytes: more than processors have cache for.
TURN_BYTES = 2**28


def _next_of(functions: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """Calls each of them in turn."""
    each = itertools.cycle(functions)
    return lambda: next(each)()


def _decode_limit(setting: Setting, who: WhoAttends) -> float:
    """Cached keys over keys read, averaged over queries of all sets of groups."""
    assert who.memberships is not None
    generator = torch.Generator().manual_seed(setting.seed)
    queries = torch.rand(256, setting.num_groups, generator=generator).argsort(-1) < setting.top_k
    shared = queries.float() @ who.memberships[0].cpu().float().T > 0
    shared[:, : setting.sink_tokens] = True
    shared[:, setting.length - setting.local_window :] = True
    return setting.length / float(shared.sum(dim=-1).float().mean())


def random_problem(setting: Setting, num_queries: int | None = None) -> Problem:
    """A sequence of random tokens in balanced random groups; all of them are queries, or the last ones."""
    generator = torch.Generator().manual_seed(setting.seed)
    queries = setting.length if num_queries is None else num_queries

    def heads(count: int, length: int) -> Tensor:
        tokens = torch.randn(1, length, count, setting.head_dim, generator=generator)
        return tokens.to(setting.device, setting.torch_dtype).transpose(1, 2)

    query = heads(setting.heads, queries)
    key, value = (heads(setting.kv_heads, setting.length) for _ in range(2))
    order = torch.rand(1, setting.length, setting.num_groups, generator=generator).argsort(-1)
    who = who_attends(setting, (order < setting.top_k).to(setting.device), queries)
    return Problem(query, key, value, who, Scores(setting.head_dim**-0.5))


def who_attends(setting: Setting, memberships: Tensor, num_queries: int) -> WhoAttends:
    """Who attends when tokens are in these groups, bool ``(1, S, K)``, as a model says it."""
    numbers = sets.set_numbers(memberships.int().topk(setting.top_k).indices, setting.num_groups)
    meeting = sets.meeting(setting.num_groups, setting.top_k, memberships.device)
    reads = meeting[numbers[:, numbers.shape[1] - num_queries :]][:, None, ..., None]
    groups = numbers.to(torch.uint8 if meeting.shape[0] <= 256 else torch.int16)[:, None]
    positions = torch.arange(numbers.shape[1], device=numbers.device)[None]
    groups, reads = of_all_heads(groups, reads, setting.kv_heads)
    pattern = Pattern(setting.local_window, setting.sink_tokens)
    return WhoAttends(pattern, positions, groups, reads, first_position=0, memberships=memberships)


def dense_functions(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """The dense attentions that can compute this call, by name: on CUDA each backend, else as PyTorch chooses."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name, backend in _CUDA_BACKENDS.items() if query.device.type == "cuda" else ():
        function = partial(dense_attention, query, key, value, causal=causal, backend=backend)
        try:
            function()
        except RuntimeError:  # not for this dtype, shape or card
            continue
        found[name] = function
    return found or {"SDPA": partial(dense_attention, query, key, value, causal=causal)}


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, backend: SDPBackend | None = None
) -> Tensor:
    """By one backend, or as PyTorch chooses."""
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )


def _kernel(setting: Setting, query: Tensor, value: Tensor) -> Kernel:
    return find_kernel(query, value) if setting.kernel == "auto" else kernel_named(setting.kernel)
