"""Quality against pairs computed, in every mode, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from ..adapter import Router, focus_layers, observe_routing
from .modes import Mode, attending, list_modes
from .perplexity import SlidingWindows, attended_share, position_curve, token_losses

#: Windows on which pairs are counted: they hardly vary, and counting costs more than running the model.
_COUNTED = 4


@dataclass(frozen=True)
class QualityRow:
    """One line of a quality table.

    Args:
        mode: ``"dense"`` (adapter off), ``"local"`` (window and sinks only), ``"soft"`` (the gated attention of
            training, all pairs computed) or ``"hard"`` (Focus).
        top_k: groups per token in hard mode, else ``None``.
        perplexity: ``exp`` of the mean loss per predicted token.
        pairs: share of the possible query-key pairs that routed layers attend to, 0 to 1.
        positions: mean loss by position, see `position_curve`.
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

    def __str__(self) -> str:
        return str(Mode(self.mode, self.top_k))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quality_table(
    model: nn.Module, windows: Tensor, top_ks: Iterable[int] | None = None, batch_size: int = 4
) -> Iterator[QualityRow]:
    """Measure dense, local-only and Focus attention on the same windows, one row at a time.

    Args:
        model: a model with an active Focus adapter; it keeps its own settings.
        windows: token ids ``(N, T)``, each read from scratch.
        top_ks: values of ``top_k`` to measure; the adapter's own by default.
        batch_size: windows at a time.
    """
    length = windows.shape[1]
    whole = SlidingWindows.of(windows.reshape(-1), length, length)
    own = focus_layers(model)[0].routing_config.top_k
    modes = list_modes(["dense", "local", "hard"], [own] if top_ks is None else top_ks)
    return measure_quality(model, whole, modes, batch_size)


def measure_quality(
    model: nn.Module, text: SlidingWindows, modes: Sequence[Mode], batch_size: int = 4
) -> Iterator[QualityRow]:
    """One `QualityRow` for each mode.

    Raises:
        ValueError: no Focus adapter is active.
    """
    copies = text.copies(focus_layers(model)[0].routing_config.local_window)
    for mode in modes:
        members: dict[Router, Tensor] = {}
        with attending(model, mode):
            with observe_routing(model, _count_members(members)):
                losses = token_losses(model, text.windows, batch_size)
            pairs = 1.0 if mode.name in ("dense", "soft") else attended_share(model, text.windows[:_COUNTED])
        shares = [counts / counts.sum() for counts in members.values()] if mode.name == "hard" else []
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
        )


def _mean(losses: Tensor) -> float | None:
    return losses.double().mean().item() if losses.numel() else None


def _count_members(members: dict[Router, Tensor]) -> Callable[[Router, Tensor, Tensor], None]:
    """An observer that adds up how many tokens each group of each layer holds."""

    def count(layer: Router, scores: Tensor, memberships: Tensor) -> None:
        counts = memberships.flatten(0, 1).sum(dim=0).double()
        members[layer] = members[layer] + counts if layer in members else counts

    return count
