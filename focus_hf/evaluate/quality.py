"""Quality against pairs computed, in every mode, on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..adapter import focus_layers
from .divergence import Divergence
from .modes import OPPONENTS, Mode, at_share, attending, list_modes
from .opponents import Cost, less_scoring, selector_named
from .perplexity import SlidingWindows, attended_share, paired_excess, position_curve, token_losses

#: Windows on which pairs are counted: they hardly vary, and counting costs more than running the model.
_COUNTED = 4


@dataclass(frozen=True)
class QualityRow:
    """One line of a quality table.

    Args:
        mode: ``"dense"`` (adapter off), ``"local"`` (window and sinks only), ``"soft"`` (the gated attention of
            training, all pairs computed), ``"hard"`` (Focus), or one of its `OPPONENTS` at as many pairs.
        top_k: groups per token in hard mode; of the Focus row that an opponent is compared with; else ``None``.
        perplexity: ``exp`` of the mean loss per predicted token.
        pairs: share of the possible query-key pairs that routed layers attend to, 0 to 1.
        loaded: share of the keys that routed layers load for them, once for all query heads of a key head: more than
            ``pairs`` where each of these chooses for itself.
        positions: mean loss by position, see `position_curve`.
        width: see `Mode`.
        budget: see `Mode`.
        excess, stderr: see `paired_excess`; ``None`` where dense was not measured.
        divergence: how far predictions are from dense attention's, mean nats per token, see `Divergence`; ``None``
            where dense was not measured.
        copies, rest: mean loss in nats on tokens that were seen before, out of the adapter's window only (see
            `far_copies`), and on all others; ``None`` where there are none.
        scoring: what choosing costs beside the pairs, see `scoring_of`.
    """

    mode: str
    top_k: int | None
    perplexity: float
    pairs: float
    positions: list[dict[str, float]] = field(default_factory=list)
    copies: float | None = None
    rest: float | None = None
    width: int | None = None
    excess: float | None = None
    stderr: float | None = None
    budget: str | None = None
    scoring: dict[str, float] | None = None
    loaded: float | None = None
    divergence: float | None = None

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
    model: nn.Module,
    text: SlidingWindows,
    modes: Sequence[Mode],
    batch_size: int = 4,
    count_scoring: bool = False,
) -> Iterator[QualityRow]:
    """One `QualityRow` for each mode, dense first; an opponent without a width gets one by the pairs of Focus here.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        text: the windows.
        modes: see `list_modes`.
        batch_size: windows at a time.
        count_scoring: opponents without a width have as many pairs less what their choosing costs, in products, and
            with what Focus' costs.

    Raises:
        ValueError: no Focus adapter is active.
    """
    length = text.windows.shape[1]
    copies = text.copies(focus_layers(model)[0].routing_config.local_window)
    dense: Tensor | None = None
    divergence = Divergence()
    focus_pairs: dict[tuple[int | None, str | None], float] = {}
    for mode in sorted(modes, key=lambda mode: mode.name != "dense"):
        if mode.name in OPPONENTS and mode.width is None:
            setting = mode.top_k, mode.budget
            if setting not in focus_pairs:
                focus_pairs[setting] = focus_share(model, mode, text.windows)
            own = _scoring_of_cells(model, length) if count_scoring else None
            mode = matched(mode, focus_pairs[setting], length, count_scoring, own.products if own else 0.0)
        compared = mode.name == "dense" or dense is not None
        with attending(model, mode, text.windows) as counted:
            losses = token_losses(model, text.windows, batch_size, divergence.look if compared else None)
            if counted is not None:
                pairs, loaded = counted.share, counted.loaded_share
            else:
                pairs = 1.0 if mode.name in ("dense", "soft") else attended_share(model, text.windows[:_COUNTED])
                loaded = pairs  # all query heads of a key head read the same
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
            _mean(losses[copies]),
            _mean(losses[text.scored & ~copies]),
            mode.width,
            excess,
            stderr,
            mode.budget,
            scoring_of(model, mode, length),
            loaded,
            divergence.mean(text.scored) if compared else None,
        )


def focus_share(model: nn.Module, mode: Mode, windows: Tensor) -> float:
    """The share of pairs that Focus attends to, at the ``top_k`` and budget of an opponent's mode."""
    with attending(model, replace(mode, name="hard"), windows):
        return attended_share(model, windows[:_COUNTED])


def matched(mode: Mode, share: float, length: int, count_scoring: bool = False, own: float = 0.0) -> Mode:
    """An opponent's mode with the width at which it reads as many pairs as Focus.

    Args:
        mode: of the opponent.
        share: of Focus.
        length: tokens of each window.
        count_scoring: with what choosing costs Focus, less what it costs the opponent.
        own: what choosing costs Focus, in products.

    Raises:
        ValueError: choosing alone costs more.
    """
    if count_scoring:
        share = min(1.0, less_scoring(share + own, selector_named(mode.name), length))  # nobody reads more than all
    return at_share(mode, share, length)


def scoring_of(model: nn.Module, mode: Mode, length: int) -> dict[str, float] | None:
    """What choosing costs beside the pairs in windows of a length, see `focus_hf.evaluate.opponents.Cost`.

    Of opponents, and of Focus by cells; ``None`` of anything else.
    """
    if mode.name in OPPONENTS:
        return asdict(selector_named(mode.name).cost(length))
    own = _scoring_of_cells(model, length) if mode.name == "hard" else None
    return asdict(own) if own else None


def _scoring_of_cells(model: nn.Module, length: int) -> Cost | None:
    """Each number of the adapter is one product of a token, and the group of each key one number that is read."""
    layers = focus_layers(model)
    config = layers[0].routing_config
    if not config.by_cells:
        return None
    heads, queries, size = config.key_value_heads, config.query_heads, config.head_dim
    assert heads and queries and size  # checked where the configuration met the model
    numbers = sum(tensor.numel() for tensor in layers[0].tensors_of(layers[0].active_adapters[0]))
    return Cost(
        products=numbers / (queries * 2 * size) / ((length + 1) / 2),
        bytes=(numbers / heads + length) / (2 * size * length),
    )


def _mean(losses: Tensor) -> float | None:
    return losses.double().mean().item() if losses.numel() else None
