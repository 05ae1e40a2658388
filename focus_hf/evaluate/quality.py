"""Quality against pairs computed, in every mode, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..adapter import Router, focus_layers, observe_routing
from .modes import Mode, attending, list_modes
from .opponents import equal_window
from .perplexity import SlidingWindows, attended_share, paired_excess, position_curve, token_losses

#: Windows on which pairs are counted: they hardly vary, and counting costs more than running the model.
_COUNTED = 4


@dataclass(frozen=True)
class QualityRow:
    """One line of a quality table.

    Args:
        mode: ``"dense"`` (adapter off), ``"local"`` (window and sinks only), ``"soft"`` (the gated attention of
            training, all pairs computed), ``"hard"`` (Focus), or an opponent of it at equal cost: ``"window"``,
            ``"random"``, ``"tokens"``.
        top_k: groups per token in hard mode; of the Focus row that an opponent is compared with; else ``None``.
        perplexity: ``exp`` of the mean loss per predicted token.
        pairs: share of the possible query-key pairs that routed layers attend to, 0 to 1.
        positions: mean loss by position, see `position_curve`.
        width: of a window.
        budget: see `Mode`.
        excess, stderr: see `paired_excess`; ``None`` where dense was not measured.
        copies, rest: mean loss in nats on tokens that were seen before, out of the adapter's window only (see
            `far_copies`), and on all others; ``None`` where there are none.
        largest_group, smallest_group: share of memberships in the largest and the smallest group of any layer, on this
            text, in hard mode.
    """

    mode: str
    top_k: int | None
    perplexity: float
    pairs: float
    positions: list[dict[str, float]] = field(default_factory=list)
    largest_group: float | None = None
    smallest_group: float | None = None
    copies: float | None = None
    rest: float | None = None
    width: int | None = None
    excess: float | None = None
    stderr: float | None = None
    budget: str | None = None

    def __str__(self) -> str:
        return str(Mode(self.mode, self.top_k, self.width, self.budget))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quality_table(
    model: nn.Module, windows: Tensor, top_ks: Iterable[int] | None = None, batch_size: int = 4
) -> Iterator[QualityRow]:
    """Measure dense, local-only and Focus attention, and windows with as many pairs as Focus, on the same windows.

    One row at a time.

    Args:
        model: a model with an active Focus adapter; it keeps its own settings.
        windows: token ids ``(N, T)``, each read from scratch.
        top_ks: values of ``top_k`` to measure; the adapter's own by default.
        batch_size: windows at a time.
    """
    length = windows.shape[1]
    whole = SlidingWindows.of(windows.reshape(-1), length, length)
    own = focus_layers(model)[0].routing_config.top_k
    modes = list_modes(["dense", "local", "hard", "window"], [own] if top_ks is None else top_ks)
    return measure_quality(model, whole, modes, batch_size)


def measure_quality(
    model: nn.Module, text: SlidingWindows, modes: Sequence[Mode], batch_size: int = 4
) -> Iterator[QualityRow]:
    """One `QualityRow` for each mode, dense first; a window without a width gets one by the pairs of Focus here.

    Raises:
        ValueError: no Focus adapter is active.
    """
    copies = text.copies(focus_layers(model)[0].routing_config.local_window)
    dense: Tensor | None = None
    focus_pairs: dict[tuple[int | None, str | None], float] = {}
    for mode in sorted(modes, key=lambda mode: mode.name != "dense"):
        if mode.name == "window" and mode.width is None:
            mode = matched(model, mode, text.windows, focus_pairs.get((mode.top_k, mode.budget)))
        members: dict[Router, Tensor] = {}
        with attending(model, mode, text.windows):
            with observe_routing(model, _count_members(members)):
                losses = token_losses(model, text.windows, batch_size)
            pairs = 1.0 if mode.name in ("dense", "soft") else attended_share(model, text.windows[:_COUNTED])
        shares = [counts / counts.sum() for counts in members.values()] if mode.name == "hard" else []
        if mode.name == "dense":
            dense = losses
        if mode.name == "hard":
            focus_pairs[mode.top_k, mode.budget] = pairs
        excess, stderr = (None, None) if dense is None else paired_excess(losses, dense, text.scored)
        yield QualityRow(
            mode.name,
            mode.top_k,
            text.perplexity(losses),
            pairs,
            position_curve(losses),
            max((float(share.max()) for share in shares), default=None),
            min((float(share.min()) for share in shares), default=None),
            _mean(losses[copies]),
            _mean(losses[text.scored & ~copies]),
            mode.width,
            excess,
            stderr,
            mode.budget,
        )


def matched(model: nn.Module, mode: Mode, windows: Tensor, pairs: float | None = None) -> Mode:
    """A window mode with the width at which it attends to as many pairs as Focus on these windows.

    Args:
        model: with an active Focus adapter.
        mode: with the ``top_k`` and the budget of Focus.
        windows: token ids ``(N, T)``.
        pairs: of Focus, if they have been counted.
    """
    if pairs is None:
        with attending(model, replace(mode, name="hard")):
            pairs = attended_share(model, windows[:_COUNTED])
    config = focus_layers(model)[0].routing_config
    return replace(mode, width=equal_window(config, windows.shape[1], pairs))


def _mean(losses: Tensor) -> float | None:
    return losses.double().mean().item() if losses.numel() else None


def _count_members(members: dict[Router, Tensor]) -> Callable[[Router, Tensor, Tensor], None]:
    """An observer that adds up how many tokens each group of each layer holds."""

    def count(layer: Router, scores: Tensor, memberships: Tensor) -> None:
        counts = memberships.flatten(0, 1).sum(dim=0).double()
        members[layer] = members[layer] + counts if layer in members else counts

    return count
