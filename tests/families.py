"""Small random models of every supported family, and adapters whose groups are uneven enough to matter."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Gemma2PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

try:  # what huggingface_hub talks HTTP with: httpx2 from version 2 on
    import httpx2 as httpx  # noqa: F401
except ModuleNotFoundError:
    import httpx  # noqa: F401

from focus_hf import FocusConfig
from focus_hf.adapter import focus_layers
from focus_hf.attention import Pattern, WhoAttends, by_memberships, count_pairs

VOCABULARY = 99
WINDOW, SINKS, GROUPS = 8, 2, 4

_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_INTERLEAVED = {
    **_LLAMA_LIKE,
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "llama": _LLAMA_LIKE,
    "mistral": {**_LLAMA_LIKE, "sliding_window": None},
    "qwen2": _LLAMA_LIKE,
    "olmo2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gemma2": {**_INTERLEAVED, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},  # SDPA leaves out its cap
    "gemma3_text": {**_INTERLEAVED, "query_pre_attn_scalar": 8},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "phi3": {**_LLAMA_LIKE, "sliding_window": None},
}

#: Families that are routed as transformers loads them by itself: before 5.21 it gives Gemma-2 SDPA, and it is refused.
BY_DEFAULT = [family for family in FAMILIES if family != "gemma2" or not Gemma2PreTrainedModel._supports_sdpa]

#: Families with sliding layers, which stay as they are.
INTERLEAVED = ("gemma2", "gemma3_text")


@functools.cache
def _base(family: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=0, **FAMILIES[family]
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # the usual initialisation is so small that attention hardly matters
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def base_model(family: str) -> Any:
    """A fresh copy of the family's small model, in eval mode."""
    return copy.deepcopy(_base(family))


def focus_config(**changes: Any) -> FocusConfig:
    values = {"num_groups": GROUPS, "local_window": WINDOW, "sink_tokens": SINKS, "task_type": "CAUSAL_LM"}
    return FocusConfig(**{**values, **changes})


#: With ``routing="cells"``: a random router reads some cells and leaves others under this threshold.
CELLS: dict[str, Any] = {"routing": "cells", "num_bands": 3, "group_dim": 4, "threshold": -5.5}

#: The same, every query head choosing for itself.
EACH: dict[str, Any] = {**CELLS, "each_query_head": True}

ROUTINGS: dict[str, dict[str, Any]] = {"shared": {}, "cells": CELLS, "each": EACH}


def focus_model(family: str, seed: int = 1, **changes: Any) -> Any:
    """The family's model with a random adapter, in eval mode."""
    base = base_model(family)  # the first one made of a family takes random numbers
    torch.manual_seed(seed)
    model = get_peft_model(base, focus_config(**changes))
    unbalance(model)
    return model.eval()


def unbalance(model: Any) -> None:
    """Give the balance potentials random values, so that they must be honoured to get the right result, and routers by
    cells values that make groups of a few keys and queries that differ."""
    for layer in focus_layers(model):
        for name, balance in layer.focus_balance.items():
            balance.data.normal_(std=0.5 if layer.configs[name].by_cells else 2.0)
            if layer.configs[name].by_cells:
                layer.focus_cell_bias[name].data.normal_(std=0.5)
                layer.focus_offset[name].data.normal_(std=0.2)


def token_ids(batch: int = 2, length: int = 48, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def logits(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids, **kwargs).logits


def pairs_of(pattern: Pattern, memberships: torch.Tensor) -> tuple[int, int]:
    """Pairs attended and pairs possible of whole sequences with a routing that all heads share."""
    batch, length, _ = memberships.shape
    positions = torch.arange(length).expand(batch, length)
    who = WhoAttends(pattern, positions, *by_memberships(memberships, length), first_position=0)
    attended, possible = count_pairs(who)
    return int(attended[0]), possible
