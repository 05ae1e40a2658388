"""Hard Focus attention by the cheapest exact path.

* ``triton``: kernels of ours that read keys where they lie. Inference on CUDA.
* ``native``: the same in machine code, compiled where it runs. Inference on a CPU.
* ``grouped``: the paper's two calls, over groups of tokens and windows, for a shared routing. Differentiable.
* ``masked``: explicit masks; slower, but right for every option.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kernels import Kernel
from .masked import masked_focus_attention
from .native import fits_native, native_focus_attention
from .on_device import device_focus_attention, fits_device
from .problem import Problem
from .prompt import grouped_focus_attention

#: The paths that call no backend, by name.
_OTHERS: dict[str, Callable[[Problem], Tensor]] = {
    "triton": device_focus_attention,
    "native": native_focus_attention,
    "masked": masked_focus_attention,
}

PATHS = ("auto", "triton", "native", "grouped", "masked")

#: From how many queries the paper's calls are taken, whose plan is made anew for each; and from how many keys they go
#: before the native path, where tokens next to each other share what they read, and are in many groups (measured by
#: `python -m studies.paths`).
GROUPED_FROM, GROUPED_FIRST_FROM = 9, 2048


def focus_attention(problem: Problem, *, path: str = "auto", kernel: Kernel | None = None) -> Tensor:
    """Hard Focus attention.

    Args:
        problem: what to compute.
        path: a name in `PATHS`. One that cannot compute this problem is passed over for one that can.
        kernel: the backend of the grouped path; by default the best one.

    Returns:
        ``(B, H, Q, D_v)``.
    """
    chosen = choose_path(problem, path)
    return grouped_focus_attention(problem, kernel) if chosen == "grouped" else _OTHERS[chosen](problem)


def choose_path(problem: Problem, path: str = "auto") -> str:
    """The path that `focus_attention` takes."""
    usable = usable_paths(problem)
    if path in usable:
        return path
    return next(name for name in usable if name != "grouped" or problem.num_queries >= GROUPED_FROM)


def usable_paths(problem: Problem) -> list[str]:
    """The paths that can compute a problem, the cheapest first where they pay."""
    if not problem.is_plain:
        return ["masked"]
    query, key, value = problem.query, problem.key, problem.value
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    grouped = ["grouped"] if problem.who.memberships is not None else []
    if needs_gradient:
        return [*grouped, "masked"]
    triton = ["triton"] if fits_device(problem) else []
    native = ["native"] if fits_native(problem) else []
    if native and grouped and problem.num_keys < _grouped_first_from(problem):
        return ["native", *grouped, "masked"]
    return [*triton, *grouped, *native, "masked"]


def _grouped_first_from(problem: Problem) -> int:
    """From how many keys the paper's calls are faster than the native path; later where tokens are in several groups,
    which makes for more calls."""
    assert problem.who.memberships is not None
    many_sets = problem.who.reads.shape[-2] > problem.who.memberships.shape[-1] + 1  # of groups, than there are groups
    return 4 * GROUPED_FIRST_FROM if many_sets else GROUPED_FIRST_FROM
