"""Hard Focus attention by the cheapest exact path.

* ``grouped``: kernels over groups and windows; cost follows the attended pairs. Differentiable.
* ``biased``: one dense call with a bias; for few tokens and heavy groups, where there is little to skip. CPU.
* ``masked``: explicit masks; slower, but right for every option.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .biased import biased_focus_attention
from .grouped import grouped_focus_attention
from .kernels import Kernel, find_kernel
from .mask import Pattern
from .masked import masked_focus_attention

PATHS = ("auto", "grouped", "biased", "masked")


def focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: Tensor,
    memberships: Tensor,
    scale: float,
    *,
    documents: Tensor | None = None,
    extra_mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    path: str = "auto",
    kernel: Kernel | None = None,
) -> Tensor:
    """Hard Focus attention of the last ``Q`` of ``S`` tokens.

    Args:
        query, key, value, pattern, positions, memberships, scale: see `masked_focus_attention`.
        documents, extra_mask, softcap, sink_logits, dropout: likewise.
        path: a name in `PATHS`. One that cannot compute this call is passed over for one that can.
        kernel: the backend of the grouped path; by default the best one.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    chosen = "masked"
    if extra_mask is None and softcap is None and dropout == 0.0 and path != "masked":
        kernel = find_kernel(query, value) if kernel is None else kernel
        chosen = choose_path(query, key, value, pattern, memberships, kernel, sink_logits, path)
    if chosen == "grouped":
        return grouped_focus_attention(
            query,
            key,
            value,
            pattern,
            positions,
            memberships,
            scale,
            documents=documents,
            sink_logits=sink_logits,
            kernel=kernel,
        )
    if chosen == "biased":
        return biased_focus_attention(query, key, value, pattern, positions, memberships, scale, documents=documents)
    return masked_focus_attention(
        query,
        key,
        value,
        pattern,
        positions,
        memberships,
        scale,
        documents=documents,
        extra_mask=extra_mask,
        softcap=softcap,
        sink_logits=sink_logits,
        dropout=dropout,
    )


def choose_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    memberships: Tensor,
    kernel: Kernel,
    sink_logits: Tensor | None = None,
    path: str = "auto",
) -> str:
    """The path that `focus_attention` takes where no mask, soft-capping or dropout is asked for."""
    usable = _usable_paths(query, key, value, memberships, sink_logits)
    return path if path in usable else min(usable, key=lambda p: _cost(p, query, key, pattern, memberships))


def _usable_paths(
    query: Tensor, key: Tensor, value: Tensor, memberships: Tensor, sink_logits: Tensor | None
) -> list[str]:
    """The paths that can compute a call without masks, softcap and dropout."""
    usable = ["masked"]
    if bool(memberships.any(dim=-1).all()):
        usable.append("grouped")
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.device.type == "cpu" and sink_logits is None and not needs_gradient and value.shape[-1] <= key.shape[-1]:
        usable.append("biased")
    return usable


def _cost(path: str, query: Tensor, key: Tensor, pattern: Pattern, memberships: Tensor) -> float:
    """Rough cost of a path per sequence and head, in pairs of dense attention at its best."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    share = num_queries / num_keys * (2.0 - num_queries / num_keys)  # of the causal triangle
    if path == "masked":  # no pair is skipped, and every mask is built
        return 3.0 * num_queries * num_keys + _CALL
    if path == "biased":
        return share * (1.2 * _causal(num_keys)) + _CALL
    sizes = memberships.sum(dim=1).float().mean(dim=0).tolist()
    overlaps = sum(sizes) > 1.5 * num_keys  # exclusions make the heads longer
    groups = sum((1.14 if overlaps else 1.0) * _causal(size) + _CALL for size in sizes)
    return share * groups + 1.35 * num_queries * (pattern.local_window + 32) + 4 * _CALL


#: A kernel call and what surrounds it, in pairs.
_CALL = 10_000.0


def _causal(length: float) -> float:
    """Causal attention over this many tokens: kernels work in larger blocks, and faster, the more there are."""
    block, slowness = (256, 1.0) if length >= 768 else (64, 1.85) if length >= 192 else (32, 2.25)
    return slowness * length * (length / 2 + block / 2)
