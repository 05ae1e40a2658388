"""Hard attention of a model's layer: against its cache as it is stored, in eager mode and under torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import (
    HeadClass,
    Kernel,
    Pattern,
    Problem,
    Scores,
    attend_by_class,
    attend_one_query,
    attend_one_token,
    count_up,
    find_kernel,
    focus_attention,
    groups_per_head,
    kernel_named,
    read_classes,
    write_classes,
)
from .call import OneTokenRouting, Routing
from .masks import problem_of, read_mask, with_reads
from .remembered import append_memberships
from .stored import attend_stored, can_store_by_groups, store_by_groups, too_short_to_store


def hard_attention(
    routing: Routing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scores: Scores,
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
        scores: how they are made.
        is_sliding: the layer's own attention has a sliding window.

    Returns:
        ``(B, H, Q, D_v)``.

    Raises:
        ValueError: the kernel asked for cannot compute this.
    """
    layer, memberships, groups_each = routing.cache_layer, routing.memberships, routing.groups_each
    kernel = find_kernel(query, value) if routing.kernel is None else routing.kernel
    if routing.kernel is not None and (why := kernel.unsupported(query, value)) is not None:
        raise ValueError(
            f"kernel {kernel.name!r} cannot compute this attention: {why}. Choose another one, or 'auto', with "
            "focus_hf.set_routing(model, kernel=...)."
        )
    if routing.in_stores:
        total = layer.get_seq_length() + key.shape[2]
        positions, documents, extra_mask = read_mask(mask, query, total)
        if scores.is_plain and extra_mask is None and documents is None:
            output = attend_stored(
                *(layer, query, key, value, positions, memberships, scores, kernel),
                reads=routing.reads,
                groups_each=groups_each,
                unpadded=mask is None,
            )
            if output is not None:
                return output
        layer.restore()
        memberships = append_memberships(layer, memberships, routing.owner, groups_each)
        groups_each = layer.groups_each
        key, value = layer.update(key, value)

    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if torch.compiler.is_compiling() and not learns and not _is_one_graph(routing, kernel, mask, scores):
        p, s = routing.pattern, scores
        numbers = (p.local_window, p.sink_tokens, p.dense_below, s.scale, s.softcap, s.dropout, is_sliding)
        how = (routing.path, kernel.name, write_classes(routing.classes))
        output = _compiled(query, key, value, mask, memberships, routing.reads, s.sink_logits, s.bias, *numbers, *how)
        return output.transpose(1, 2)
    problem = problem_of(
        *(query, key, value, mask, routing.pattern, memberships, scores),
        is_sliding=is_sliding,
        groups_each=groups_each,
    )
    if routing.classes is None:
        output = focus_attention(problem, path=routing.path, kernel=kernel)
    else:
        output = _by_class(problem, routing.classes, routing.reads, routing.path, kernel)
    if layer is not None and not output.requires_grad and _is_stored_from_now_on(routing, problem, kernel):
        known = mask is None, routing.classes, kernel.one_row_at_a_time
        store_by_groups(layer, routing.pattern, problem.who.positions, *known)
    return output


def attend_new_token(routing: OneTokenRouting, tensors: Sequence[Tensor], scale: float | None) -> Tensor | None:
    """Inference: one new token for each sequence against keys in plain storage, with plain scores and nothing
    hidden.

    Args:
        routing: of this call.
        tensors: queries ``(B, H, 1, D)``, keys ``(B, H_kv, S, D)`` and values ``(B, H_kv, S, D_v)``.
        scale: factor on ``q . k``, ``D ** -0.5`` if ``None``.

    Returns:
        ``(B, H, 1, D_v)``; ``None`` where the keys are not those of the tokens that were routed.
    """
    token, layer, (query, key, value) = routing.token, routing.cache_layer, tensors
    length = key.shape[2]
    if token.length != length:
        return None
    output = attend_one_token(query, key, value, token, query.shape[-1] ** -0.5 if scale is None else scale)
    if not too_short_to_store(layer):
        kernel = find_kernel(query, value)
        if can_store_by_groups(layer, token.num_groups, routing.groups_each, kernel, routing.classes):
            positions = count_up(length, like=key).expand(key.shape[0], length)
            known = True, routing.classes, kernel.one_row_at_a_time
            store_by_groups(layer, routing.pattern, positions, *known)
    return output


def _is_stored_from_now_on(routing: Routing, problem: Problem, kernel: Kernel) -> bool:
    """Whether the cache layer is to be stored by groups after this call."""
    layer, classes = routing.cache_layer, routing.classes
    if not layer.must_store and too_short_to_store(layer):
        return False
    if not problem.is_plain or problem.who.documents is not None or routing.path not in ("auto", "grouped"):
        return layer.must_store
    if classes is None:
        return can_store_by_groups(layer, routing.memberships.shape[-1], routing.top_k, kernel)
    if problem.scores.sink_logits is not None:
        return layer.must_store
    # With routing per head a token is in one group; otherwise in as many as its head reads.
    top_k = 1 if routing.reads is not None else routing.top_k
    return layer.must_store or can_store_by_groups(layer, groups_per_head(classes), top_k, kernel, classes)


def _by_class(
    problem: Problem, classes: Sequence[HeadClass], reads: Tensor | None, path: str, kernel: Kernel
) -> Tensor:
    """Heads that attend in different ways; the new tokens read the groups ``reads``, or those that they belong to."""
    if problem.num_queries == 1:
        return attend_one_query(problem, classes, reads)
    return attend_by_class(with_reads(problem, reads), classes, path=path, kernel=kernel)


def _is_one_graph(routing: Routing, kernel: Kernel, mask: Tensor | None, scores: Scores) -> bool:
    """Whether the call reads nothing back (`attention.device_path`), so that torch.compile can look into it."""
    known = routing.groups_each is not None and routing.classes is None and (mask is None or mask.dim() == 2)
    return known and scores.is_plain and not kernel.one_row_at_a_time and routing.path in ("auto", "grouped")


# Otherwise which tokens meet depends on the data, which torch.compile cannot trace and a CUDA graph cannot record: to
# both, the call is one opaque operation.
@torch.library.custom_op("focus_hf::hard_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    memberships: Tensor,
    reads: Tensor | None,
    s_aux: Tensor | None,
    bias: Tensor | None,
    local_window: int,
    sink_tokens: int,
    dense_below: int,
    scale: float,
    softcap: float | None,
    dropout: float,
    is_sliding: bool,
    path: str,
    kernel: str,
    classes: list[int],
) -> Tensor:
    """`focus_attention` under the model's mask, as an operation: ``(B, Q, H, D_v)``, contiguous."""
    pattern, scores = Pattern(local_window, sink_tokens, dense_below), Scores(scale, softcap, s_aux, dropout, bias)
    problem = problem_of(query, key, value, mask, pattern, memberships, scores, is_sliding=is_sliding)
    known, backend = read_classes(classes), kernel_named(kernel)
    if known is None:
        output = focus_attention(problem, path=path, kernel=backend)
    else:
        output = _by_class(problem, known, reads, path, backend)
    return output.transpose(1, 2).contiguous()


@_compiled.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, queries = query.shape[:3]
    return query.new_empty(batch, queries, heads, value.shape[-1])
