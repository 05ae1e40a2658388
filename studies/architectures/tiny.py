"""Small random models of every causal language model that transformers knows, made from their configurations.

What a configuration's numbers mean is told by their names, which families share. A number that no rule knows stays
what it is by default. `EXCEPTIONS` holds what names do not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY = 99
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 32, 4, 2, 8, 12

#: Numbers of a tiny model, for all names under which configurations have them.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size patch_vocab_size"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks",
    ),
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim word_embed_proj_dim lru_width "
        "hidden_size_global input_embedding_size output_embedding_size cross_attention_hidden_size "
        "attention_hidden_size ple_embed_dim "
        "dim_model_base",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads "
        "index_n_heads linear_num_heads indexer_n_heads",
    ),
    (
        KV_HEADS,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads indexer_kv_heads "
        "num_query_groups num_global_key_value_heads swa_num_kv_heads",
    ),
    (
        HEAD_DIM,
        "head_dim attention_head_size dim_head d_head qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "swa_head_dim swa_v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim "
        "indexer_head_dim rotary_dim global_head_dim attention_head_dim",
    ),
    (
        48,
        "intermediate_size ffn_dim ffn_hidden_size n_inner d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size "
        "intermediate_size_mlp expert_ffn_hidden_size feed_forward_size prefix_dense_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size moe_latent_size",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads mamba_n_heads "
        "mamba_num_heads n_mamba_heads index_topk_blocks",
    ),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts n_shared_experts num_shared_experts "
        "moe_num_shared_experts num_codebooks",
    ),
    (1, "n_group topk_group num_expert_group mamba_n_groups n_groups mamba_ngroups mamba_d_groups zero_expert_num"),
    (
        16,
        "q_lora_rank kv_lora_rank o_lora_rank mamba_d_state state_size ssm_state_size router_hidden_size hc_lowrank "
        "laurel_rank adapter_rank mamba_d_head mamba_head_dim mamba_headdim d_rel gated_norm_rank mamba_chunk_size "
        "chunk_size hidden_size_per_layer_input qk_head_dim time_step_rank mamba_dt_rank index_topk index_block_size "
        "rel_extent indexer_budget",
    ),
    (
        WINDOW,
        "sliding_window attention_chunk_size window_size attention_window_size sliding_window_size local_attention",
    ),
    (
        256,
        "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length context_length model_max_length "
        "original_max_position_embeddings max_target_positions max_source_positions",
    ),
    (64, "mamba_d_ssm global_rope_size"),
)
TINY = {name: size for size, names in _SIZES for name in names.split()}

#: Numbers that count layers: what is small by default stays, what is more than a tiny model has becomes this.
_COUNTS_OF_LAYERS = {
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_kv_shared_layers": 2,
    "max_window_layers": 2,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "sliding_window_pattern": 2,
    "global_attn_every_n_layers": 2,
    "layer_group_size": 2,
}

#: Numbers that families may leave open, and compute with.
_NEEDED = (
    *("head_dim", "n_routed_experts", "num_experts", "num_local_experts", "n_group", "topk_group"),
    *("num_experts_per_tok", "n_shared_experts"),
    *("indexer_n_heads", "indexer_head_dim", "indexer_budget"),
)


@dataclass(frozen=True)
class Variant:
    """A family once more.

    Args:
        family: its model type.
        config: changes of its configuration, to have what the default leaves out.
        adapter: changes of the adapter's configuration, as the refusal of the default one says.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "blt, decoder": Variant("blt", adapter={"target_modules": r"model\.local_decoder\.layers\.\d+\.self_attn"}),
    "gemma4_text, shared keys": Variant("gemma4_text", {"num_kv_shared_layers": 2}),
    "ministral, sliding layers": Variant("ministral", adapter={"include_sliding_layers": True}),
    "mistral, no window": Variant("mistral", {"sliding_window": None}),
    "mistral, sliding layers": Variant("mistral", adapter={"include_sliding_layers": True}),
    "moshi, sliding layers": Variant("moshi", adapter={"include_sliding_layers": True}),
    "recurrent_gemma, sliding layers": Variant("recurrent_gemma", adapter={"include_sliding_layers": True}),
}

#: What names do not tell, by model type (also of a configuration inside another).
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "doge": {"keep_window_size": 256},  # as large as the longest context, as by default
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": WIDTH},
    },
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 2 * HEAD_DIM},
    "gemma4_text": {"per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}},
    "gemma4_unified_text": {"per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds_dim": [WIDTH // 2, WIDTH // 2], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
}


def names() -> list[str]:
    """Model types of all causal language models of the installed transformers, and `VARIANTS`."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def variant_of(family: str) -> Variant:
    """What a name in `names` means."""
    return VARIANTS.get(family, Variant(family))


def _model_class(family: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]


def tiny_config(family: str) -> Any:
    """The configuration of a tiny model of a family."""
    variant = variant_of(family)
    config_class = CONFIG_MAPPING[variant.family]
    own_class = _model_class(variant.family).config_class
    if own_class in config_class.sub_configs.values():
        config_class = own_class  # MusicGen's language model is the decoder alone
    decoder = {"is_decoder": True} if hasattr(config_class(), "is_decoder") else {}  # BERT and its kin, as decoders
    return _shrunk(
        config_class, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, **decoder, **variant.config}
    )


def _shrunk(config_class: Any, given: dict[str, Any]) -> Any:
    """A small configuration of a class; ``given`` values stand above all rules."""
    default = config_class()
    given = {**given, **EXCEPTIONS.get(config_class.model_type, {})}
    values: dict[str, Any] = {}
    known = default.to_dict()
    for name, value in known.items():
        if name in config_class.sub_configs and isinstance(getattr(default, name), PretrainedConfig):
            values[name] = _shrunk(type(getattr(default, name)), given.get(name, {})).to_dict()
        elif name in given:
            values[name] = given[name]
        elif isinstance(value, list) and name.endswith(("layer_types", "layers_block_type", "indexer_types")):
            values[name] = _pattern(value)
        elif value is None and name in _NEEDED:
            values[name] = TINY[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            values[name] = _small(name, value)
    if known.get("num_key_value_heads", 0) in (None, known.get("num_attention_heads")):
        values["num_key_value_heads"] = HEADS
    return config_class(**{**given, **values})


def _small(name: str, value: int) -> int:
    """A number of a tiny model's configuration."""
    if name in TINY:
        return TINY[name]
    if name in _COUNTS_OF_LAYERS:
        return min(value, _COUNTS_OF_LAYERS[name])
    if name.endswith(("_token_id", "_token_index", "_index", "_id")) and value >= VOCABULARY:
        return VOCABULARY - 1
    return value


def _pattern(types: list[Any]) -> list[Any]:
    """Types of the layers of a tiny model: each kind that a large one has, in turn."""
    kinds = list(dict.fromkeys(types))
    return [kinds[index % len(kinds)] for index in range(LAYERS)]


def tiny_model(family: str) -> Any:
    """A tiny model with random weights, in eval mode, whose attention matters."""
    torch.manual_seed(0)
    model = _model_class(variant_of(family).family)._from_config(tiny_config(family)).eval()
    for parameter in model.parameters():  # the usual initialisation is so small that attention hardly matters
        if parameter.dim() >= 2 and parameter.is_floating_point():
            torch.nn.init.normal_(parameter, std=0.25)
    model.tie_weights()
    return model
