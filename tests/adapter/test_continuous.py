"""transformers' continuous batching gives, for each prompt of a batch, what `generate` gives for it alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache, offloading_manager

import focus_hf
from focus_hf.adapter import focus_layers, interface
from focus_hf.adapter.engines import continuous
from focus_hf.adapter.engines import pages as engine_pages
from focus_hf.attention import native
from focus_hf.bench.serving import dense_by_request
from tests import families as families_module
from tests.families import (
    CELLS,
    FAMILIES,
    INTERLEAVED,
    ROUTINGS,
    WINDOW,
    focus_config,
    focus_model,
    token_ids,
    unbalance,
)

families = pytest.mark.parametrize("family", FAMILIES)

#: A prompt within the window, one that leaves it while it is continued, and longer ones that begin alike.
LENGTHS = (WINDOW - 4, WINDOW, 20, 48, 61)
NEW_TOKENS = 10


@pytest.fixture(autouse=True, scope="module")
def without_soft_capping() -> Iterator[None]:
    """transformers' paged attention leaves Gemma-2's soft-capping out, so its own answers differ from `generate`'s."""
    FAMILIES["gemma2"]["attn_logit_softcapping"] = None
    families_module._base.cache_clear()
    yield
    del FAMILIES["gemma2"]["attn_logit_softcapping"]
    families_module._base.cache_clear()


def prompts_of(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """The longer ones begin alike."""
    return [token_ids(1, length, seed=seed + (length < 20)).squeeze(0).tolist() for length in lengths]


def pages(**changes: Any) -> ContinuousBatchingConfig:
    """A small cache, and chunked prefill: a call has room for 32 tokens of the prompts' some 150."""
    values = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32, "max_memory_percent": 0.1}
    return ContinuousBatchingConfig(**{**values, "return_logprobs": True, **changes})


def greedy(**changes: Any) -> GenerationConfig:
    values = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**{**values, **changes})


def alone(model: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS) -> list[Any]:
    """Tokens and their log probabilities, by `generate`, one prompt after the other."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        tokens = result.sequences[0, len(prompt) :]
        logprobs = torch.stack(result.logits, dim=1)[0].float().log_softmax(-1).gather(-1, tokens[:, None])
        answers.append((tokens.tolist(), logprobs[:, 0].tolist()))
    return answers


def batch(model: Any, prompts: Sequence[list[int]], config: Any = None, plan: Any = None, **kwargs: Any) -> list[Any]:
    """The same by `generate_batch`."""
    outputs = model.generate_batch(
        list(prompts), generation_config=plan or greedy(), continuous_batching_config=config or pages(), **kwargs
    )
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [(output.generated_tokens, output.logprobs) for output in outputs.values()]


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-3, atol=1e-3)


def assert_differ(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Or a test of which is which could not fail."""
    assert max(abs(a - b) for (_, x), (_, y) in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)) > 0.01


@families
@pytest.mark.parametrize("max_batch_tokens", [17, 256])  # prompts in chunks; all in one call
def test_shared_routing(family: str, max_batch_tokens: int) -> None:
    model, prompts = focus_model(family), prompts_of()
    expected = alone(model, prompts)
    assert_same(batch(model, prompts, pages(max_batch_tokens=max_batch_tokens)), expected)
    with model.disable_adapter():
        assert_differ(alone(model, prompts), expected)


@families
@pytest.mark.parametrize("max_batch_tokens", [17, 256])
def test_cells(family: str, max_batch_tokens: int) -> None:
    model, prompts = focus_model(family, **CELLS).double(), prompts_of()
    expected = alone(model, prompts)
    assert_same(batch(model, prompts, pages(max_batch_tokens=max_batch_tokens)), expected)
    with model.disable_adapter():
        assert_differ(alone(model, prompts), expected)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sharing", [True, False])
def test_keys_are_read_in_place_where_there_are_kernels(
    routing: str, sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gathered elsewhere: with forks, too, which copy blocks behind our back."""
    model, prompts, plan, found = focus_model("llama", **ROUTINGS[routing]), prompts_of((20, 45)), greedy(), {}
    plan.num_return_sequences = 2
    calls: list[Any] = []
    decode = continuous.decode_in_place
    monkeypatch.setattr(continuous, "decode_in_place", lambda *args: calls.append(len(args[0])) or decode(*args))
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(continuous, "reads_in_place", lambda *_: False)
        found[in_place] = batch(model, prompts, pages(allow_block_sharing=sharing), plan)
        assert (max(calls, default=0) == 4) == (in_place and native.missing() is None)
        calls.clear()
    assert_same(found[True], found[False])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_keys_written_in_another_mode_over_older_ones(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request is answered: what is known of its pages is not what was known of the older ones."""
    attend = continuous.attend_pages

    def prompts_without_groups(call: Any, query: Any, *rest: Any) -> Any:
        call.alone = query.shape[2] > len(prompts)  # tokens of their answers read groups again
        return attend(call, query, *rest)

    found = []
    for trusted in (True, False):
        model, prompts = focus_model("llama", **ROUTINGS[routing]), prompts_of((48, 61))
        with monkeypatch.context() as patch:
            if not trusted:
                versions = itertools.count(10**6)
                patch.setattr(engine_pages, "version", lambda _: next(versions))  # noqa: B023
            try:
                options = {"persistent_manager": True, "config": pages(allow_block_sharing=False, num_blocks=24)}
                batch(model, prompts_of((48, 61), seed=5), **options)
                patch.setattr(interface, "attend_pages", prompts_without_groups)
                found.append(batch(model, prompts, **options))
            finally:
                model.base_model.model.destroy_cached_continuous_batching_manager()
    assert_same(*found)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 2},
        {"sink_tokens": 0},
        {"dense_below": 30},
        {"num_groups": 3, "top_k": 3},
        {"num_groups": 20, "top_k": 11},
    ],
)
def test_every_part_of_the_pattern(changes: dict[str, int]) -> None:
    model, prompts = focus_model("llama", **changes), prompts_of()
    assert_same(batch(model, prompts), alone(model, prompts))


@families
def test_off_dense_and_without_groups(family: str) -> None:
    model, prompts = focus_model(family), prompts_of()
    with model.disable_adapter():
        dense = alone(model, prompts)
        assert_same(batch(model, prompts), dense)
    focus_hf.set_routing(model, mode="dense")
    assert_same(batch(model, prompts), dense)
    focus_hf.set_routing(model, mode="window", window=3)
    assert_same(batch(model, prompts), alone(model, prompts))


@families
@pytest.mark.parametrize("sharing", [True, False])
def test_forks(family: str, sharing: bool) -> None:
    """Several answers to a prompt: its full pages are shared or copied, the one begun is copied."""
    model, prompts, plan = focus_model(family), prompts_of((20, 45)), greedy()
    plan.num_return_sequences = 3  # transformers allows it for sampling only, and asks when a plan is made
    found = batch(model, prompts, pages(allow_block_sharing=sharing), plan)
    assert_same(found, [answer for answer in alone(model, prompts) for _ in range(3)])


@families
def test_requests_that_arrive_while_others_are_answered(family: str) -> None:
    model, prompts = focus_model(family), prompts_of((48, 61, 20, 6))
    expected = alone(model, prompts)
    found: dict[str, Any] = {}
    with model.continuous_batching_context_manager(greedy(), continuous_batching_config=pages()) as manager:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(number), streaming=True, max_new_tokens=NEW_TOKENS)
            for _ in range(3):  # tokens of those before it, before the next one comes
                result = manager.get_result(timeout=60)
                found[result.request_id] = (result.generated_tokens, result.logprobs)
        while any(len(found.get(str(n), ([],))[0]) < NEW_TOKENS for n in range(len(prompts))):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None
            found[result.request_id] = (result.generated_tokens, result.logprobs)
    assert_same([found[str(number)] for number in range(len(prompts))], expected)


def shared_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each search for a shared prefix finds, from now on."""
    search, found = PagedAttentionCache.search_prefix_match, []

    def watched(self: Any, *args: Any) -> int:
        found.append(search(self, *args))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", watched)
    return found


#: Sliding layers share no pages. What pages do is not the family's business, so all but one are slow.
FULL_ATTENTION = [
    pytest.param(family, marks=[pytest.mark.slow] if number else [])
    for number, family in enumerate(family for family in FAMILIES if family not in INTERLEAVED)
]


@pytest.mark.parametrize("family", FULL_ATTENTION)
@pytest.mark.parametrize("sharing", [True, False])
def test_prompts_that_begin_alike_share_pages(family: str, sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = focus_model(family), [prompts_of((48,))[0], prompts_of((61,))[0]]
    found = shared_tokens(monkeypatch)
    expected, config = alone(model, prompts), pages(allow_block_sharing=sharing)
    try:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert_same(batch(model, [prompt], config, persistent_manager=True), [answer])
    finally:
        model.base_model.model.destroy_cached_continuous_batching_manager()
    assert max(found, default=0) == (48 if sharing else 0)


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_pages_written_under_other_settings_are_not_shared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache, the same prompts, and each time another adapter, mode, dial, or centroids that were changed."""
    model, prompts = focus_model(family), prompts_of((48, 61))
    model.add_adapter("other", focus_config())
    unbalance(model)
    found = shared_tokens(monkeypatch)

    def check() -> list[Any]:
        del found[:]
        expected = alone(model, prompts)
        assert_same(batch(model, prompts, persistent_manager=True), expected)
        assert found[0] == 0  # the second prompt of a batch may find pages of the first
        return expected

    try:
        one = check()
        model.set_adapter("other")
        assert_differ(check(), one)
        with model.disable_adapter():
            assert_differ(check(), one)
        focus_hf.set_routing(model, top_k=2)
        check()
        focus_hf.set_routing(model, mode="local")
        check()
        focus_hf.set_routing(model, mode=None)
        with torch.no_grad():
            for layer in focus_layers(model):
                layer.focus_balance["other"].normal_(std=2.0)
        check()
        model.set_adapter("default")
        assert_same(check(), one)
    finally:
        model.base_model.model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("space", [pytest.param(0.0, marks=pytest.mark.slow), 0.01])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_requests_put_aside(family: str, space: float, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache too small for all: some are begun anew (no space), or go to the CPU and come back."""
    empty, asides = torch.empty, []
    # There is no pinned memory without an accelerator.
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    offload = offloading_manager.OffloadingManager._offload_to_cpu

    def watched(self: Any, victims: Any, tables: Any) -> set[str]:
        asides.append(offload(self, victims, tables))
        return asides[-1]

    monkeypatch.setattr(offloading_manager.OffloadingManager, "_offload_to_cpu", watched)
    model, prompts = focus_model(family, **ROUTINGS[routing]), prompts_of((30, 33, 35, 31))
    found = batch(
        model, prompts, pages(num_blocks=12, cpu_offload_space=space, safety_margin=0.0), greedy(max_new_tokens=24)
    )
    assert_same(found, alone(model, prompts, new_tokens=24))
    assert asides and any(asides) == (space > 0)


def test_dense_attention_of_each_request_by_itself() -> None:
    """What the benchmark compares with is dense attention."""
    model, prompts = focus_model("llama"), prompts_of()
    with model.disable_adapter():
        expected = alone(model, prompts)
        with dense_by_request():
            assert_same(batch(model, prompts), expected)


def test_an_adapter_loaded_onto_a_cache_in_use_asks_for_a_new_one() -> None:
    model, prompts = focus_model("llama"), prompts_of((48,))
    base = model.unload()
    try:
        batch(base, prompts, persistent_manager=True)
        base.add_adapter(focus_config(), "late")
        outputs = base.generate_batch(prompts, generation_config=greedy(), persistent_manager=True)
        assert "destroy_cached_continuous_batching_manager" in str([o.error for o in outputs.values()])
    finally:
        base.destroy_cached_continuous_batching_manager()
    assert_same(batch(base, prompts), alone(base, prompts))


@pytest.mark.parametrize(
    "setting, why",
    [
        ({"mode": "soft"}, "cannot be soft"),
        ({"include_sliding_layers": True}, "does not route sliding layers"),
        ({**CELLS, "answer_pairs": 1.0}, "set_routing(model, answer_pairs=None)"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(setting: dict[str, Any], why: str) -> None:
    turned = {name: setting[name] for name in ("mode", "answer_pairs") if name in setting}
    model = focus_model("gemma3_text", **{name: value for name, value in setting.items() if name not in turned})
    focus_hf.set_routing(model, **turned)
    outputs = model.generate_batch(prompts_of((20,)), generation_config=greedy(), continuous_batching_config=pages())
    (error,) = [output.error for output in outputs.values()]
    assert why in error and "\n" not in error
