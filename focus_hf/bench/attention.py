"""Attention alone: prefill and decoding, against the fastest dense attention of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..adapter.room import Room
from ..adapter.stored import pays_from
from ..attention import (
    GroupedStore,
    Known,
    OneToken,
    Problem,
    Scores,
    WhoAttends,
    Windows,
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

    Taking the token in is part of it; what routes it is not.
    """
    query, *_ = random_call(setting, 1)
    _, key, value, memberships = random_call(setting, setting.length)
    by_groups = setting.length >= pays_from(setting.num_groups, setting.top_k)
    kernel = _kernel(setting, query, value)
    key, value = key.contiguous(), value.contiguous()  # as a cache holds them
    focus = (_by_groups if by_groups else _by_numbers)(setting, query, key, value, memberships, kernel)
    denses = dense_functions(query, key, value, causal=False)
    times = interleaved({**denses, "focus": focus}, setting.device, seconds, least=40, most=200)
    baseline = min(denses, key=lambda name: times[name])
    return Measurement(
        "decode",
        setting,
        times[baseline],
        times["focus"],
        limit=_decode_limit(setting, memberships[0]),
        baseline=baseline,
        path=f"by groups, {kernel.name}" if by_groups else "plain, by numbers",
    )


#: That come one after the other.
_NEW_TOKENS = 512


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


def _by_numbers(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, kernel: Kernel
) -> Callable[[], Tensor]:
    held = [key, value, numbers_of(memberships, setting.num_groups, setting.top_k)]
    groups, rooms = random_call(setting, _NEW_TOKENS)[3], [Room() for _ in held]
    own = numbers_of(groups, setting.num_groups, setting.top_k)
    reads = torch.zeros(groups.shape, device=setting.device).masked_fill(~groups, float("-inf"))
    key_of_one, value_of_one, windows = key[:, :, :1], value[:, :, :1], Windows((setting.pattern,))

    def focus() -> Tensor:
        step = held[0].shape[2] - setting.length
        new = key_of_one, value_of_one, own[..., step : step + 1]
        for place, room in enumerate(rooms):
            held[place] = room.append(held[place], new[place], -1 if place == 2 else -2)
        token = OneToken(held[2], reads[:, step : step + 1], windows)
        return attend_one_token(query, held[0], held[1], token, setting.head_dim**-0.5)

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
    grouped_queries = query.shape[1] != key.shape[1]

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped_queries)

    if query.device.type != "cuda":
        return {"SDPA": dense}
    functions: dict[str, Callable[[], Tensor]] = {}
    for name, backend in CUDA_BACKENDS.items():

        def with_backend(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return dense()

        try:
            with_backend()
        except RuntimeError:  # not for this dtype, shape or card
            continue
        functions[name] = with_backend
    return functions or {"SDPA": dense}


def _kernel(setting: Setting, query: Tensor, value: Tensor) -> Kernel:
    return find_kernel(query, value) if setting.kernel == "auto" else kernel_named(setting.kernel)
