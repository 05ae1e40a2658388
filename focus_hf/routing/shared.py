"""The paper's routing (arXiv 2604.03260): which groups a token belongs to.

Scores come from a hidden state and a layer's centroids; everything else here turns scores into soft assignments
(training) or hard memberships (inference), and keeps the groups balanced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

#: How fast `balance_step` goes where nothing else is said.
BALANCE_RATE = 0.2

#: Log of next to nothing; ``-inf`` would give NaN gradients.
_NO_MASS = -1e4


def without_autocast(device: str) -> AbstractContextManager:
    """``torch.autocast(device, enabled=False)``, which is not for nothing where autocast is off as it is."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def at_least_float32(numbers: Tensor) -> Tensor:
    """Numbers in float32, or as they are where that is less: a score decides which pairs of tokens exist at all."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def group_scores(hidden_states: Tensor, projection: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """Score every token against every centroid: ``z = (W_g h) . C / tau`` (paper, section 3), in float32 whatever the
    model's dtype, see `at_least_float32`.

    Args:
        hidden_states: ``(B, T, d)``, what enters the attention module.
        projection: ``W_g``, ``(d_g, d)``.
        centroids: ``C``, ``(K, d_g)``.
        temperature: ``tau``, positive.

    Returns:
        float32 scores, ``(B, T, K)``.
    """
    with without_autocast(hidden_states.device.type):
        projected = F.linear(hidden_states.float(), projection.float())
        return F.linear(projected, centroids.float()) / temperature


def balanced_scores(
    hidden_states: Tensor, projection: Tensor, centroids: Tensor, temperature: float, balance: Tensor
) -> Tensor:
    """`group_scores` of hidden states ``(N, d)`` with the balance ``(K,)`` added: float32 ``(N, K)``.

    In as few operations as it takes: what decides over a token's groups.
    """
    with without_autocast(hidden_states.device.type):
        projected = F.linear(hidden_states.float(), projection.float())
        return torch.addmm(balance.float(), projected, centroids.float().t(), alpha=1.0 / temperature)


def sinkhorn(scores: Tensor, iterations: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Balanced soft assignments (paper, section 3): every row a distribution, every group equal mass.

    Log-domain Sinkhorn over the tokens of each sequence by itself; each round normalises tokens, then groups, so that
    rows are exact distributions at the end. Too few rounds let groups collapse: the paper uses 10. Balancing a whole
    batch together would let each sequence crowd into a few groups of its own, which inference could not follow.

    Args:
        scores: ``(B, T, K)``, or ``(N, K)`` for one sequence.
        iterations: rounds, at least 1.
        valid: bool, ``scores.shape[:-1]``.

    Returns:
        Assignments with the shape of ``scores`` (rows of invalid tokens are distributions too, but did not take
        part), and each sequence's column potentials ``b`` (mean zero), ``(B, K)`` or ``(K,)``, such that
        ``assignments = softmax(scores + b)``.
    """
    num_groups = scores.shape[-1]
    padding = None if valid is None else ~valid[..., None]
    tokens = scores.shape[-2] if valid is None else valid.sum(dim=-1)[..., None, None].clamp(min=1)
    mass_per_group = torch.as_tensor(tokens / num_groups, dtype=scores.dtype, device=scores.device).log()
    potentials = scores.new_zeros(*scores.shape[:-2], 1, num_groups)
    for _ in range(iterations):
        log_assignments = F.log_softmax(scores + potentials, dim=-1)
        if padding is not None:
            log_assignments = log_assignments.masked_fill(padding, _NO_MASS)
        potentials = potentials + mass_per_group - torch.logsumexp(log_assignments, dim=-2, keepdim=True)
    potentials = potentials - potentials.mean(dim=-1, keepdim=True)
    return torch.softmax(scores + potentials, dim=-1), potentials.squeeze(-2)


def score_spread(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    """How far a token's scores lie apart: their root mean square over groups, for the median token of a sequence.

    What a token's groups have in common is left out, and what is common to all tokens. Medians, because a few tokens
    far away from all others would decide a mean: the others would count as undecided then, and their groups merge.

    Args:
        scores: ``(B, T, K)``.

    Returns:
        ``(B, 1, 1)``, positive, without gradient.
    """
    scores = scores.detach()
    scores = scores - scores.mean(dim=-1, keepdim=True)
    centred = scores - _median(scores, valid)
    return _median(centred.square().mean(dim=-1, keepdim=True).sqrt(), valid).clamp(min=1e-6)


def sharpening(scores: Tensor, sharpness: float | None, valid: Tensor | None = None) -> Tensor:
    """What to multiply scores and balance potentials with in training, so that tokens are as decided as wanted.

    Left alone, training drives scores apart in its first few steps, and the softmax saturates. Memberships do not
    depend on such a factor.

    Args:
        scores: ``(B, T, K)``.
        sharpness: the `score_spread` to reach; ``None`` for whatever it is.

    Returns:
        ``(B, 1, 1)``, without gradient.
    """
    if sharpness is None:
        return torch.ones_like(scores[:, :1, :1])
    return sharpness / score_spread(scores, valid)


def _median(values: Tensor, valid: Tensor | None) -> Tensor:
    """``(B, T, N)`` to ``(B, 1, N)``: the lower median over the tokens that count, 0 if none does."""
    if valid is None:
        return values.sort(dim=-2).values[:, None, (values.shape[-2] - 1) // 2]
    counts = valid.sum(dim=-1)[:, None, None].expand(-1, 1, values.shape[-1])
    ranked = values.masked_fill(~valid[..., None], float("inf")).sort(dim=-2).values
    return torch.where(counts > 0, ranked.gather(-2, (counts - 1).clamp(min=0) // 2), 0.0)


def balanced_assignments(
    scores: Tensor, balance: Tensor, iterations: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Soft assignments as inference weighs groups, with Sinkhorn's gradient.

    The value is ``softmax(z + b)``: the largest entries are the hard memberships, so that what is trained is what
    runs. Sinkhorn's own potentials differ from sequence to sequence, which inference cannot follow; but through them
    a token that moves to a group moves others out of it, and longer trainings end worse without that gradient
    (docs/results.md). So they are there for the backward pass only.

    Args:
        scores: ``(B, T, K)``.
        balance: the layer's potentials ``b``, ``(K,)`` or ``(B, 1, K)``; all zero means that there are none yet, and
            Sinkhorn's own are taken.
        iterations: rounds of Sinkhorn.

    Returns:
        Assignments ``(B, T, K)``, and Sinkhorn's potentials ``(B, 1, K)`` without gradient.
    """
    potentials = sinkhorn(scores, iterations, valid)[1][:, None]
    found = potentials.detach()
    value = torch.where(balance.any(), balance, found)
    return torch.softmax(scores + value + potentials - found, dim=-1), found


def balance_step(
    scores: Tensor, balance: Tensor, top_k: int, valid: Tensor | None = None, rate: float = BALANCE_RATE
) -> Tensor:
    """By how much to change the balance potentials, for hard memberships that are more even next time.

    Groups with too many tokens become dearer, the others cheaper (as in auxiliary-loss-free mixtures of experts), in
    units of how far the median token is from another group: a larger step would send most of them there at once, and
    back. A mean over sequences, so that processes may average theirs.

    Args:
        scores: ``(B, T, K)``.
        balance: the potentials now, ``(K,)``.
        top_k: groups per token.
        rate: factor on the step.

    Returns:
        ``(K,)``, mean zero, without gradient.
    """
    scores = scores.detach()
    if top_k == scores.shape[-1]:
        return torch.zeros_like(scores[0, 0])
    weights = torch.ones_like(scores[..., :1]) if valid is None else valid[..., None].to(scores.dtype)
    weights = weights / weights.sum(dim=-2, keepdim=True).clamp(min=1)  # tokens that count share alike
    last, next_one = _at_the_edge(scores + balance, top_k)
    margins = last - next_one  # how far each token is from another group
    shares = (hard_memberships(scores, balance, top_k).float() * weights).sum(dim=-2) / top_k
    step = (_median(margins, valid)[:, 0] * (1 - shares.shape[-1] * shares)).mean(dim=0)
    return rate * (step - step.mean())


def _at_the_edge(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The score of the last group that each token is in, and of the best that it is not in: ``(..., 1)`` each."""
    last, next_one = scores.topk(top_k + 1, dim=-1).values[..., -2:].split(1, dim=-1)
    return last, next_one


def hard_memberships(scores: Tensor, balance: Tensor, top_k: int) -> Tensor:
    """The groups a token belongs to at inference: the ``top_k`` largest of ``z + b``.

    A function of the token's own hidden state alone, hence causal and the same in prefill and decode.

    Args:
        scores: ``(..., K)``.
        balance: the layer's balance potentials ``b``, ``(K,)``.
        top_k: groups per token, ``1 <= top_k <= K``.

    Returns:
        bool, shape of ``scores``; exactly ``top_k`` entries of a row are ``True``.
    """
    chosen = (scores + balance).topk(top_k, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard`` with the gradient of ``soft``: what is trained is what runs."""
    return hard.to(soft.dtype) + soft - soft.detach()


def group_shares(memberships: Tensor, valid: Tensor | None = None) -> Tensor:
    """Share of the tokens' memberships that each group holds; balanced means ``1 / K`` everywhere.

    Args:
        memberships: bool, ``(..., K)``.
        valid: bool, ``memberships.shape[:-1]``.

    Returns:
        float32, ``(K,)``, sums to 1.
    """
    counted = memberships.reshape(-1, memberships.shape[-1])
    if valid is not None:
        counted = counted[valid.reshape(-1)]
    counts = counted.sum(dim=0).float()
    return counts / counts.sum().clamp(min=1)


def calibrate_balance(scores: Tensor, top_k: int, balance: Tensor | None = None, steps: int = 100) -> Tensor:
    """Balance potentials for which the *hard* memberships of these tokens are balanced.

    Sinkhorn balances soft mass, which is not the same as balanced top-k memberships. Starting from the given
    potentials, each step moves every group's potential by a decaying part of what it would take for that group alone
    to hold its share (`_shortfall`), however far away its tokens are.

    Args:
        scores: ``(..., K)``, the tokens of the domain.
        top_k: groups per token.
        balance: where to start, ``(K,)``; ``None`` starts from the Sinkhorn potentials of ``scores``.
        steps: number of updates.

    Returns:
        float32 ``(K,)``, mean zero: the potentials with the smallest largest group that were met.
    """
    tokens = scores.detach().reshape(-1, scores.shape[-1]).float()
    num_groups = tokens.shape[-1]
    current = sinkhorn(tokens, iterations=10)[1] if balance is None else balance.detach().float().clone()
    if num_groups == 1 or top_k == num_groups:
        return current - current.mean()
    best, best_share = current, float("inf")
    for i in range(steps):
        largest = group_shares(hard_memberships(tokens, current, top_k)).max().item()
        if largest < best_share:
            best, best_share = current, largest
        if largest * num_groups < 1.001:
            break
        current = current + _shortfall(tokens, current, top_k) / (2 + i / 10)
    return best - best.mean()


def _shortfall(scores: Tensor, balance: Tensor, top_k: int) -> Tensor:
    """By how much each group's potential would have to rise for that group alone to hold its share of the tokens.

    ``(N, K)`` scores to ``(K,)``; a group's share is ``top_k / K`` of all tokens.
    """
    scores = scores + balance
    last, next_one = _at_the_edge(scores, top_k)
    lead = scores - torch.where(scores >= last, next_one, last)  # above what keeps a token out of this group, or would
    outside = round(len(scores) * (1 - top_k / scores.shape[-1]))
    return -lead.sort(dim=0).values[max(outside - 1, 0)]
