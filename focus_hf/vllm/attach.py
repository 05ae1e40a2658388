"""An adapter into a model that vLLM has loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import Signature, signature
from typing import Any

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..adapter import FocusConfig
from ..adapter.layer import OF_CELLS
from ..routing.cells import CellRouter
from .backend import FocusBackend, FocusImpl
from .router import CellsRouter, LayerRouter, Rotary, SharedRouter, bytes_of_groups
from .slots import padded_page
from .start import ServedAdapter


def attach(model: nn.Module, vllm_config: Any, adapter: ServedAdapter) -> None:
    """Let all attention layers of a model attend by `FocusBackend`: routed ones by their groups, others to everything.

    vLLM asks the layers for their backend when it lays out the KV cache, which comes after this.

    Args:
        model: as a loader of vLLM returns it.
        vllm_config: of the engine.
        adapter: to be served.

    Raises:
        ValueError: a layer attends in a way that Focus does not know.
    """
    register_backend(AttentionBackendEnum.CUSTOM, f"{FocusBackend.__module__}.{FocusBackend.__qualname__}")
    tensors = adapter.tensors()
    here = {id(layer): layer for layer in vllm_config.compilation_config.static_forward_context.values()}
    for name, module in model.named_modules():
        for layer in module.children():
            if not isinstance(layer, Attention) or here.pop(id(layer), None) is None:
                continue
            if (why := _not_routed(module, layer)) is not None:
                raise ValueError(f"Focus does not route {name}: it {why}.")
            impl = FocusImpl(layer.num_heads, layer.head_size, layer.impl.scale, layer.num_kv_heads)
            number = extract_layer_index(layer.layer_name)
            if number in tensors:
                device = next(module.parameters()).device
                own = {kind: tensor.to(device) for kind, tensor in tensors[number].items()}
                impl.router = _router(adapter.config, own, module, layer)
            layer.impl, layer.attn_backend, layer.backend = impl, FocusBackend, AttentionBackendEnum.CUSTOM
            if impl.router.needs_hidden:
                hook = partial(_see_hidden, impl, signature(module.forward))
                module.register_forward_pre_hook(hook, with_kwargs=True)
            # Layers that are not routed have the same pages, for all layers must.
            groups = bytes_of_groups(adapter.config, layer.num_kv_heads)
            layer.get_kv_cache_spec = partial(_with_groups, layer.get_kv_cache_spec, groups)
    if here:
        raise ValueError(f"Focus found no attention module around {next(iter(here.values())).layer_name}.")


def _with_groups(make: Callable[[Any], Any], group_bytes: int, vllm_config: Any) -> Any:
    """vLLM's plan of a layer's cache, with room for groups in each page."""
    spec = make(vllm_config)
    return replace(spec, page_size_padded=padded_page(spec.page_size_bytes, spec.block_size, group_bytes))


def _router(config: FocusConfig, tensors: dict[str, Tensor], module: Any, layer: Any) -> LayerRouter:
    """What routes a layer of an attention module; of several processes, each has as many heads, see `check_engine`."""
    if not config.by_cells:
        return SharedRouter(config, tensors)
    router = CellRouter(**{field: tensors[kind].float() for field, kind in OF_CELLS.items()})
    rotary = getattr(module, "rotary_emb", None)
    turn = None if rotary is None else Rotary(rotary.cos_sin_cache, bool(rotary.is_neox_style), layer.head_size)
    first = get_tensor_model_parallel_rank() * layer.num_kv_heads
    return CellsRouter(config, router.of_heads(first, layer.num_kv_heads), turn)


def _not_routed(module: nn.Module, layer: Any) -> str | None:
    """Why a layer cannot be computed by `FocusImpl`, as the end of a sentence."""
    if "hidden_states" not in signature(module.forward).parameters:
        return "is not handed the hidden states"
    if layer.attn_type != AttentionType.DECODER:
        return f"is of type {layer.attn_type}"
    if layer.sliding_window is not None:
        return "has a sliding window"
    if layer.head_size_v != layer.head_size:
        return "has values of another size than keys"
    if layer.kv_sharing_target_layer_name is not None:
        return "uses the keys of another layer"
    if layer.kv_cache_dtype != "auto":
        return f"caches its keys as {layer.kv_cache_dtype}"
    impl = layer.impl
    extras = (
        ("logits_soft_cap", "caps its scores"),
        ("alibi_slopes", "adds a bias to its scores"),
        ("sinks", "has learned sinks"),
    )
    for name, what in extras:
        value = getattr(impl, name, None)
        if value is not None and not (isinstance(value, int | float) and not value):
            return what
    return None


def _see_hidden(
    impl: FocusImpl, entering: Signature, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The hook of an attention module: what enters it, which its layer is not told."""
    impl.hidden_states = entering.bind(*args, **kwargs).arguments["hidden_states"]
