"""Attention alone: prefill and decoding, against the fastest dense attention of the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..adapter.last_tokens import Routed
from ..adapter.room import Room
from ..adapter.stored import pays_from
from ..attention import (
    GroupedStore,
    Known,
    Problem,
    Scores,
    TokenByRows,
    WhoAttends,
    attend_one_token,
    attend_store,
    count_pairs,
    find_kernel,
    focus_attention,
    kernel_named,
    make_plan,
    numbers_of,
)
from ..attention.kernels import Kernel
from ..attention.paths import choose_path
from .settings import Measurement, Setting
from .timing import interleaved, step_shares

#: Dense attention as PyTorch chooses it.
PLAIN_SDPA = "SDPA"

#: Dense backends tried on CUDA, by name.
CUDA_BACKENDS = {
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

    def focus() -> Tensor:
        return focus_attention(problem, kernel=kernel)

    denses = dense_functions(query, key, value, causal=True)
    times = interleaved({**denses, "focus": focus}, setting.device, seconds)
    baseline = min(denses, key=lambda name: times[name])
    attended, possible = count_pairs(setting.pattern, problem.who.memberships)
    path = choose_path(problem)
    computed = make_plan(problem.who, setting.length).computed_pairs() if path == "grouped" else possible
    return Measurement(
        "attention",
        setting,
        times[baseline],
        times["focus"],
        limit=possible / attended,
        computed=computed / possible,
        baseline=baseline,
        path=f"{path}, {kernel.name}" if path == "grouped" else path,
        shares=step_shares(focus),
    )


@torch.no_grad()
def bench_decode(setting: Setting, seconds: float = 3.0) -> Measurement:
    """One new token against a cache of ``length`` tokens, stored as a model stores it; queries of random groups.

    Taking the token's key and value in is part of both; what routes it is not. As in a model, layers take turns, so
    that keys come from memory and not from a processor's cache, where the last call on them would have left them.
    """
    query, *_ = random_call(setting, 1)
    _, key, value, memberships = random_call(setting, setting.length)
    by_groups = setting.length >= pays_from(setting.num_groups, setting.top_k)
    kernel = _kernel(setting, query, value)
    take_turns: dict[str, list[Callable[[], Tensor]]] = {}
    for _ in range(max(1, TURN_BYTES // (2 * key.nbytes))):
        own = key.clone(memory_format=torch.contiguous_format), value.clone(memory_format=torch.contiguous_format)
        focus = (_by_groups if by_groups else _by_rows)(setting, query, *own, memberships, kernel)
        for name, function in {**_dense_steps(query, *own), "focus": focus}.items():
            take_turns.setdefault(name, []).append(function)
    functions = {name: _next_of(layers) for name, layers in take_turns.items()}
    times = interleaved(functions, setting.device, seconds, least=40, most=200)
    baseline = min((name for name in times if name != "focus"), key=lambda name: times[name])
    return Measurement(
        "decode",
        setting,
        times[baseline],
        times["focus"],
        limit=_decode_limit(setting, memberships[0]),
        baseline=baseline,
        path=f"by groups, {kernel.name}" if by_groups else "plain, by rows",
    )


#: Keys and values of the layers that take turns, in bytes: more than processors have cache for.
TURN_BYTES = 2**28

#: That come one after the other.
_NEW_TOKENS = 512


def _next_of(functions: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """Calls each of them in turn."""
    each = itertools.cycle(functions)
    return lambda: next(each)()


class _PlainCache:
    """Keys and values of a layer, to which the same token comes again and again."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        self._new, self._rooms = (key[:, :, :1].clone(), value[:, :, :1].clone()), (Room(), Room())

    def append(self) -> None:
        """In place, where there is room."""
        self.key = self._rooms[0].append(self.key, self._new[0], -2)
        self.value = self._rooms[1].append(self.value, self._new[1], -2)


def _dense_steps(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Dense attention of one token that comes to the cache, by the name of the backend."""

    def step(backend: str) -> Callable[[], Tensor]:
        cache = _PlainCache(key, value)

        def dense() -> Tensor:
            cache.append()
            return dense_attention(backend, query, cache.key, cache.value, causal=False)

        return dense

    return {name: step(name) for name in dense_backends(query, key, value, causal=False)}


def _by_groups(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, kernel: Kernel
) -> Callable[[], Tensor]:
    columns = torch.arange(setting.length + _NEW_TOKENS, device=setting.device)[None]
    store = GroupedStore(setting.pattern, setting.num_groups, setting.top_k, like=(key, value))
    store.append(key, value, store.pack(memberships), columns[:, : setting.length], setting.top_k)
    groups, scores = random_call(setting, _NEW_TOKENS)[3], Scores(setting.head_dim**-0.5)
    key_of_one, value_of_one = key[:, :, :1], value[:, :, :1]

    def focus() -> Tensor:
        step = store.columns.shape[1] - setting.length
        seen, new = columns[:, : setting.length + step + 1], groups[:, step : step + 1]
        return attend_store(store, query, key_of_one, value_of_one, seen, new, scores, kernel, setting.top_k)

    return focus


def _by_rows(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, kernel: Kernel
) -> Callable[[], Tensor]:
    cache = _PlainCache(key, value)
    last = Routed(numbers_of(memberships, setting.num_groups, setting.top_k), setting.num_groups, setting.pattern)
    own = numbers_of(random_call(setting, _NEW_TOKENS)[3], setting.num_groups, setting.top_k).transpose(1, 2)

    def focus() -> Tensor:
        nonlocal last
        if not last.has_room:
            last = Routed(last.find(), setting.num_groups, setting.pattern)
        step = last.shape[1] - setting.length
        last.append(own[:, step : step + 1])
        cache.append()
        token = TokenByRows(last.rows, own[:, step], last.shape[1])
        return attend_one_token(query, cache.key, cache.value, token, setting.head_dim**-0.5)

    return focus


def _decode_limit(setting: Setting, memberships: Tensor) -> float:
    """Cached keys over keys read, averaged over queries of all sets of groups."""
    generator = torch.Generator().manual_seed(setting.seed)
    queries = torch.rand(256, setting.num_groups, generator=generator).argsort(-1) < setting.top_k
    shared = queries.float() @ memberships.cpu().float().T > 0
    shared[:, : setting.sink_tokens] = True
    shared[:, setting.length - setting.local_window :] = True
    return setting.length / float(shared.sum(dim=-1).float().mean())


def random_call(setting: Setting, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random query, keys and values, and balanced random memberships ``(1, T, K)``."""
    generator = torch.Generator().manual_seed(setting.seed)

    def heads(count: int) -> Tensor:
        tokens = torch.randn(1, length, count, setting.head_dim, generator=generator)
        return tokens.to(setting.device, setting.torch_dtype).transpose(1, 2)

    query, key, value = heads(setting.heads), heads(setting.kv_heads), heads(setting.kv_heads)
    order = torch.rand(1, length, setting.num_groups, generator=generator).argsort(-1)
    return query, key, value, (order < setting.top_k).to(setting.device)


def random_problem(setting: Setting) -> Problem:
    """A whole sequence of random tokens."""
    query, key, value, memberships = random_call(setting, setting.length)
    positions = torch.arange(setting.length, device=setting.device)[None]
    known = Known(setting.top_k, unpadded=True)
    who = WhoAttends(setting.pattern, positions, memberships, known=known)
    return Problem(query, key, value, who, Scores(setting.head_dim**-0.5))


def dense_functions(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """The dense attentions that can compute this call, by name."""
    backends = dense_backends(query, key, value, causal=causal)
    return {name: partial(dense_attention, name, query, key, value, causal=causal) for name in backends}


def dense_backends(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> list[str]:
    """Names of the dense attentions that can compute this call."""
    found = []
    for name in CUDA_BACKENDS if query.device.type == "cuda" else ():
        try:
            dense_attention(name, query, key, value, causal=causal)
        except RuntimeError:  # not for this dtype, shape or card
            continue
        found.append(name)
    return found or [PLAIN_SDPA]


def dense_attention(backend: str, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """By one of `CUDA_BACKENDS`, or as PyTorch chooses."""
    with nullcontext() if backend == PLAIN_SDPA else sdpa_kernel(CUDA_BACKENDS[backend]):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )


def _kernel(setting: Setting, query: Tensor, value: Tensor) -> Kernel:
    return find_kernel(query, value) if setting.kernel == "auto" else kernel_named(setting.kernel)
