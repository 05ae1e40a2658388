"""Hard Focus attention by the cheapest exact path.

* ``grouped``: kernels over groups and windows; cost follows the attended pairs. Differentiable.
* ``biased``: one dense call with a bias; for few tokens and heavy groups, where there is little to skip. Inference on
  CPU.
* ``lookup``: keys sorted by group, where queries read other groups than they belong to. Inference on CPU, and on CUDA
  with Triton.
* ``masked``: explicit masks; slower, but right for every option.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .biased import biased_focus_attention
from .device_lookup import device_lookup_attention, fits_lookup
from .grouped import grouped_focus_attention
from .kernels import Kernel, find_kernel, triton_missing
from .lookup import lookup_focus_attention
from .masked import masked_focus_attention
from .one_query import attend_one_query
from .problem import Problem

PATHS = ("auto", "grouped", "biased", "lookup", "masked")

#: Fewer new tokens than this against a cache are not worth sorting it anew: a GPU reads it as it is, under a mask.
FEW_QUERIES = 64


def focus_attention(problem: Problem, *, path: str = "auto", kernel: Kernel | None = None) -> Tensor:
    """Hard Focus attention.

    Args:
        problem: what to compute.
        path: a name in `PATHS`. One that cannot compute this problem is passed over for one that can.
        kernel: the backend of the grouped path; by default the best one.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    chosen = choose_path(problem, path, kernel)
    if chosen == "grouped":
        return grouped_focus_attention(problem, kernel)
    if chosen == "biased":
        return biased_focus_attention(problem)
    if chosen == "lookup":
        backend = find_kernel(problem.query, problem.value) if kernel is None else kernel
        if problem.query.device.type == "cpu":
            return lookup_focus_attention(problem, backend)
        from .kernels.triton_lookup import BLOCK_QUERIES, lookup_forward  # needs Triton

        return device_lookup_attention(problem, backend, lookup_forward, BLOCK_QUERIES)
    if path == "auto" and problem.num_queries == 1 and problem.who.reads is None:
        return attend_one_query(problem)
    return masked_focus_attention(problem)


def choose_path(problem: Problem, path: str = "auto", kernel: Kernel | None = None) -> str:
    """The path that `focus_attention` takes."""
    if path == "auto" and problem.num_queries == 1 and problem.num_keys <= _FEW_KEYS:
        return "masked"
    usable = _usable_paths(problem, kernel)
    if path == "masked" or path in usable:
        return path
    return usable[0] if len(usable) == 1 else min(usable, key=lambda p: _cost(p, problem))


def _usable_paths(problem: Problem, kernel: Kernel | None = None) -> list[str]:
    if not problem.is_plain:
        return ["masked"]
    query, key, value = problem.query, problem.key, problem.value
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    on_cpu, no_logits = query.device.type == "cpu", problem.scores.sink_logits is None
    few_queries = problem.num_queries < min(FEW_QUERIES, problem.num_keys)
    if problem.who.reads is not None:
        if needs_gradient or value.shape[-1] > key.shape[-1] or problem.num_queries == 1:
            return ["masked"]
        if on_cpu:
            return ["lookup", "biased"] if no_logits else ["lookup"]
        return ["lookup"] if not few_queries and _device_looks_up(problem, kernel) else ["masked"]
    if not on_cpu and not needs_gradient and few_queries:
        return ["masked"]
    usable = ["masked", "grouped"]
    if on_cpu and no_logits and not needs_gradient and value.shape[-1] <= key.shape[-1]:
        usable.append("biased")
    return usable


def _device_looks_up(problem: Problem, kernel: Kernel | None) -> bool:
    """Whether the lookup path can be planned on the device and has its two kernels there."""
    backend = find_kernel(problem.query, problem.value) if kernel is None else kernel
    same_width = problem.value.shape[-1] == problem.key.shape[-1]
    many_rows = problem.query.device.type == "cuda" and not backend.one_row_at_a_time
    return fits_lookup(problem.who) and same_width and many_rows and triton_missing() is None


def _cost(path: str, problem: Problem) -> float:
    """Rough cost of a path per sequence and head, in pairs of dense attention at its best."""
    num_queries, num_keys = problem.num_queries, problem.num_keys
    share = num_queries / num_keys * (2.0 - num_queries / num_keys)  # of the causal triangle
    if path == "masked":  # no pair is skipped, and every mask is built; one call for all sequences
        return (3.0 if num_queries > 1 else 1.0) * num_queries * num_keys + _CALL / problem.query.shape[0]
    window = num_queries * (problem.who.pattern.local_window + 32)
    if path == "biased":
        per_pair = 1.2 if problem.who.reads is None else 1.13 + 0.27 * problem.key.shape[1] / problem.query.shape[1]
        return share * per_pair * _causal(num_keys) + _CALL
    if path == "lookup":
        groups = num_queries * (220.0 + _reads_each(problem) * (165.0 + _group_size(problem)))
        return 1.8 * window + groups * (1.0 + _SERIAL * (torch.get_num_threads() - 1))
    sizes = _group_sizes(problem)
    overlaps = sum(sizes) > 1.5 * num_keys
    length = 1.0 + 0.018 * len(sizes) if overlaps else 1.0  # exclusions make the heads longer
    groups = sum(length * _causal(size) + _CALL for size in sizes if size)
    return 1.3 * (share * groups + 1.35 * window + 4 * _CALL)


def _reads_each(problem: Problem) -> int:
    known = problem.who.known
    return 2 if known is None or known.reads_each is None else known.reads_each


def _group_size(problem: Problem) -> float:
    return problem.num_keys / max(1, problem.who.memberships.shape[-1])


def _group_sizes(problem: Problem) -> list[float]:
    """Tokens in each group: balanced, if it is known how many there are, or else counted."""
    memberships, known = problem.who.memberships, problem.who.known
    if known is not None and known.groups_each is not None:
        num_groups = memberships.shape[-1]
        return [problem.num_keys * known.groups_each / num_groups for _ in range(num_groups)]
    return memberships.sum(dim=1).float().mean(dim=0).tolist()


#: A kernel call and what surrounds it, in pairs.
_CALL = 10_000.0

#: One new token reads this many keys sooner than another path has made its calls (`_cost`).
_FEW_KEYS = int(3 * _CALL)

#: Share of the lookup path's work that further threads do not help with, as they do dense attention.
_SERIAL = 0.55


def _causal(length: float) -> float:
    """Causal attention over this many tokens: kernels work in larger blocks, and faster, the more there are."""
    block, slowness = (256, 1.0) if length >= 768 else (64, 1.85) if length >= 192 else (32, 2.25)
    return slowness * length * (length / 2 + block / 2)
