"""Many requests at once, through transformers' continuous batching: requests per second, time to the first token."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..adapter import focus_layers, observe_pairs
from ..attention import find_kernel
from ..attention.kernels import Call, Rows
from ..evaluate.modes import adapters_off, device_of
from .model import load_or_make, sdpa_by
from .settings import Measurement, Setting

#: Requests that arrive at once, and tokens that each is answered with.
REQUESTS, NEW_TOKENS = 4, 16

#: New tokens of one call, and tokens of one page.
BATCH_TOKENS, PAGE = 1024, 64


class Served(NamedTuple):
    """What one run took, in milliseconds: all of it for each request, until a request's first token (median), and the
    processor's time for each request, which other programs on the machine do not change."""

    each: float
    first_token: float
    processor: float


def bench_serving(
    setting: Setting, base: str | None = None, adapter: str | None = None, device_map: str | None = None
) -> list[Measurement]:
    """`REQUESTS` prompts of random tokens that arrive together, each answered with `NEW_TOKENS` tokens.

    Two dense opponents: transformers' own, which computes all requests of a call under one mask, and dense attention
    for each request by itself, on the same kernels as Focus. Focus is compared with the better one.

    Args:
        setting: its length is that of a prompt; see `bench_model`.
        base, adapter, device_map: see `bench_model`.

    Returns:
        Milliseconds of the whole run for each request (``"serving"``), and until the first token (``"first token"``).
    """
    model = load_or_make(setting, base, adapter, device_map)
    layers = focus_layers(model)
    generator = torch.Generator().manual_seed(setting.seed)
    prompts = torch.randint(0, model.config.vocab_size, (REQUESTS, setting.length), generator=generator)
    runs: dict[str, tuple[AbstractContextManager[None], ...]] = {
        "transformers' own": (adapters_off(layers),),
        "each request for itself": (adapters_off(layers), dense_by_request()),
        "focus": (),
    }
    served = {}
    for name, contexts in runs.items():
        with ExitStack() as within:
            for context in contexts:
                within.enter_context(context)
            _serve(model, prompts[:2, : PAGE * 2])  # libraries take time at first use
            served[name] = _serve(model, prompts)
    focus = served.pop("focus")
    return measurements(setting, served, focus, _limit(model, prompts[:1].to(device_of(model))))


def measurements(
    setting: Setting, served: dict[str, Served], focus: Served, limit: float | None = None
) -> list[Measurement]:
    """What `bench_serving` returns, from what dense opponents took, by name, and Focus."""
    measured = []
    for kind, of in (("serving", "each"), ("first token", "first_token")):
        dense = {name: getattr(some, of) for name, some in served.items()}
        best = min(dense, key=lambda name: dense[name])
        extra = {f"dense, {name} (ms)": round(value, 2) for name, value in dense.items()}
        if kind == "serving":
            extra |= {f"processor, {name} (ms)": round(some.processor, 2) for name, some in served.items()}
            extra |= {"processor, focus (ms)": round(focus.processor, 2)}
            extra |= {"dense requests/s": round(1e3 / dense[best], 3), "focus requests/s": round(1e3 / focus.each, 3)}
        how = f"{REQUESTS} requests at once, {NEW_TOKENS} tokens each; dense: {best}"
        measured.append(
            Measurement(kind, setting, dense[best], getattr(focus, of), limit, baseline=best, path=how, extra=extra)
        )
    return measured


def _serve(model: Any, prompts: Tensor) -> Served:
    """One run of all prompts, through a manager of its own."""
    length = prompts.shape[1] + NEW_TOKENS
    pages = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=prompts.shape[0] * -(-length // PAGE) + 2,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=prompts.shape[0],
        allow_block_sharing=False,
        auto_switch_to_flash=False,
        use_cuda_graph=False,
    )
    plan = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    first: dict[str, float] = {}
    finished = 0
    with model.continuous_batching_context_manager(plan, continuous_batching_config=pages) as manager:
        start, worked = time.perf_counter(), time.process_time()
        for number, prompt in enumerate(prompts.tolist()):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=NEW_TOKENS, streaming=True)
        while finished < prompts.shape[0]:
            result = manager.get_result(timeout=600)
            if result is None or result.error is not None:
                why = "no answer in ten minutes" if result is None else result.error
                raise RuntimeError(f"Serving {prompts.shape[1]} tokens failed: {why}")
            first.setdefault(result.request_id, time.perf_counter() - start)
            finished += result.is_finished()
        total, worked = time.perf_counter() - start, time.process_time() - worked
    each, processor = total * 1e3 / prompts.shape[0], worked * 1e3 / prompts.shape[0]
    return Served(each, median(first.values()) * 1e3, processor)


@torch.no_grad()
def _limit(model: Any, prompt: Tensor) -> float:
    """Pairs of a prompt that dense attention computes over those that Focus does: what attention alone could save."""
    with observe_pairs(model) as observed:
        model(input_ids=prompt, use_cache=False, logits_to_keep=1)
    return 1.0 / observed.share


def dense_by_request() -> AbstractContextManager[None]:
    """Within the block, transformers' SDPA attention computes each request of a packed call for itself."""
    return sdpa_by(_attend_each)


def _attend_each(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention, on the kernels that Focus uses: ``(1, T, H, D_v)``."""
    edges = kwargs["cu_seq_lens_q"].tolist()
    key, value = kwargs["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    key_edges = kwargs["cu_seq_lens_k"].tolist()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kernel, output = find_kernel(q, v), []
    for number in range(len(edges) - 1):
        asking, asked = slice(*edges[number : number + 2]), slice(*key_edges[number : number + 2])
        rows = Rows.single(asking.stop - asking.start, asked.stop - asked.start, q.device)
        output.append(kernel.forward(q[asking], k[asked], v[asked], Call(rows, scaling))[0].to(q.dtype))
    return torch.cat(output)[None], None
