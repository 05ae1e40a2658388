"""vLLM with an adapter gives, greedy, the tokens that transformers gives with it; needs vLLM (`make test-vllm`)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from focus_hf.adapter.save import save_adapter
from tests.adapter.test_heads import heads_model
from tests.families import base_model, focus_model, token_ids

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEW_TOKENS = 12

#: Within the window, leaving it while they are continued, and longer than a step takes.
LENGTHS = (3, 5, 8, 9, 20, 31, 32, 33, 47, 48, 61, 64, 65, 90, 128, 150)

ADAPTERS: dict[str, Any] = {
    "shared": lambda family: focus_model(family),
    "two-groups": lambda family: focus_model(family, top_k=2, dense_below=24),
    "budgets": lambda family: heads_model(family, "shared"),
    "per-head": lambda family: heads_model(family, "per_head"),
}


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """The engine in this process: it starts in seconds, and its layers can be looked at."""
    before = dict(os.environ)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    yield
    os.environ.clear()
    os.environ.update(before)


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [token_ids(1, length, seed=number)[0].tolist() for number, length in enumerate(lengths)]


def by_transformers(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        answers.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :])
    return [answer.tolist() for answer in answers]


@contextmanager
def engine(base: Path, adapter: Path | None = None, **changes: Any) -> Iterator[Any]:
    """Chunked prefill, prefix caching, 16 requests at once."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    values = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "additional_config": {} if adapter is None else {"focus": {"adapter": str(adapter)}},
    }
    llm = vllm.LLM(model=str(base), **{**values, **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def by_vllm(llm: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    plan = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], plan, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def saved(model: Any, folder: Path) -> tuple[Path, Path]:
    """Its base model and its adapter, as folders."""
    family = model.get_base_model().config.model_type
    base_model(family).save_pretrained(folder / "base")
    return folder / "base", save_adapter(model, folder / "adapter")


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", kind) for kind in ADAPTERS] + [(family, "per-head") for family in ("mistral", "qwen2", "qwen3")],
)
def test_tokens_are_those_of_transformers(family, kind, tmp_path):
    model, prompts = ADAPTERS[kind](family), prompts_of()
    expected, dense = by_transformers(model, prompts), by_transformers(base_model(family), prompts)
    with engine(*saved(model, tmp_path)) as llm:
        assert by_vllm(llm, prompts) == expected
    assert sum(one != other for one, other in zip(expected, dense, strict=True)) > len(prompts) // 2
