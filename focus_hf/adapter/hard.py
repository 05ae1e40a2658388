"""Hard attention of a model's layer: against its cache as it is stored, in eager mode and under torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import Kernel, Pattern, find_kernel, focus_attention, kernel_named
from .cache import append_memberships, attend_stores, can_store_by_groups, store_by_groups
from .call import Routing
from .masks import align, read_mask


def hard_attention(
    routing: Routing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
    *,
    is_sliding: bool,
) -> Tensor:
    """Inference: new tokens against all keys, or against a cache layer that is stored by groups.

    Args:
        routing: of this call.
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, S, D)``; of the new tokens only, if the cache layer is stored by groups.
        value: ``(B, H_kv, S, D_v)``, likewise.
        mask: see `masks.read_mask`.
        scale, softcap, s_aux, dropout: see `interface.focus_attention_forward`.
        is_sliding: the layer's own attention has a sliding window.

    Returns:
        ``(B, H, Q, D_v)``.

    Raises:
        ValueError: the kernel asked for cannot compute this.
    """
    layer, memberships = routing.cache_layer, routing.memberships
    kernel = find_kernel(query, value) if routing.kernel is None else routing.kernel
    if (why := kernel.unsupported(query, value)) is not None:
        raise ValueError(
            f"kernel {kernel.name!r} cannot compute this attention: {why}. Choose another one, or 'auto', with "
            "focus_hf.set_routing(model, kernel=...)."
        )
    plain = softcap is None and dropout == 0.0
    if routing.in_stores:
        total = layer.get_seq_length() + key.shape[2]
        positions, documents, extra_mask = read_mask(mask, query.shape, total, query.device)
        if plain and extra_mask is None and documents is None:
            output = attend_stores(layer, query, key, value, positions, memberships, scale, s_aux, kernel)
            if output is not None:
                return output
        layer.restore()
        memberships = append_memberships(layer, memberships, owner=routing.owner)
        key, value = layer.update(key, value)

    pattern = (routing.pattern.local_window, routing.pattern.sink_tokens, routing.pattern.dense_below)
    arguments = (query, key, value, mask, memberships, s_aux, *pattern, scale, softcap, dropout, is_sliding)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if torch.compiler.is_compiling() and not learns:
        return _compiled(*arguments, routing.path, kernel.name).transpose(1, 2)
    output = _attend(*arguments, routing.path, kernel)

    groups_pay = layer is not None and plain and routing.path in ("auto", "grouped") and not output.requires_grad
    if groups_pay and can_store_by_groups(layer, memberships.shape[-1], routing.top_k):
        positions, documents, extra_mask = read_mask(mask, query.shape, key.shape[2], query.device)
        if extra_mask is None and documents is None:
            store_by_groups(layer, routing.pattern, positions)
    return output


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    memberships: Tensor,
    s_aux: Tensor | None,
    local_window: int,
    sink_tokens: int,
    dense_below: int,
    scale: float,
    softcap: float | None,
    dropout: float,
    is_sliding: bool,
    path: str,
    kernel: Kernel,
) -> Tensor:
    """`focus_attention` under whatever mask the base model made."""
    seen = memberships.shape[1]
    key, value, memberships, mask = align(key, value, memberships, mask)
    positions, documents, extra_mask = read_mask(
        mask, query.shape, key.shape[2], query.device, dropped=seen - key.shape[2], is_sliding=is_sliding
    )
    return focus_attention(
        query,
        key,
        value,
        Pattern(local_window, sink_tokens, dense_below),
        positions,
        memberships,
        scale,
        documents=documents,
        extra_mask=extra_mask,
        softcap=softcap,
        sink_logits=s_aux,
        dropout=dropout,
        path=path,
        kernel=kernel,
    )


# Which tokens meet depends on the data, which torch.compile cannot trace and a CUDA graph cannot record: to both, the
# call is one opaque operation.
@torch.library.custom_op("focus_hf::hard_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    memberships: Tensor,
    s_aux: Tensor | None,
    local_window: int,
    sink_tokens: int,
    dense_below: int,
    scale: float,
    softcap: float | None,
    dropout: float,
    is_sliding: bool,
    path: str,
    kernel: str,
) -> Tensor:
    """`_attend` as an operation: ``(B, Q, H, D_v)``, contiguous."""
    numbers = (local_window, sink_tokens, dense_below, scale, softcap, dropout, is_sliding)
    output = _attend(query, key, value, mask, memberships, s_aux, *numbers, path, kernel_named(kernel))
    return output.transpose(1, 2).contiguous()


@_compiled.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, queries = query.shape[:3]
    return query.new_empty(batch, queries, heads, value.shape[-1])
