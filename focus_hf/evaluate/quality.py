"""Quality against pairs computed, in every mode, on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor, nn

from ..adapter import focus_layers
from .modes import OPPONENTS, Mode, Row, at_share, attending, list_modes
from .opponents import Cost, Counted, less_scoring, selector_named
from .perplexity import (
    Divergence,
    SlidingWindows,
    attended_share,
    count_in,
    paired_excess,
    position_curve,
    token_losses,
)

#: Windows on which pairs are counted: they hardly vary, and counting costs more than running the model.
_COUNTED = 4


@dataclass(frozen=True, kw_only=True)
class QualityRow(Row):
    """One line of a quality table.

    Args:
        mode: ``"dense"`` (adapter off), ``"local"`` (window and sinks only), ``"soft"`` (the gated attention of
            training, all pairs computed), ``"hard"`` (Focus), or one of its `OPPONENTS` at as many pairs.
        top_k, width, budget: see `Mode`.
        perplexity: ``exp`` of the mean loss per predicted token.
        pairs: share of the possible query-key pairs that routed layers attend to, 0 to 1.
        loaded: share of the keys that routed layers load for them, once for all query heads of a key head: more than
            ``pairs`` where each of these chooses for itself.
        positions: mean loss by position, see `position_curve`.
        excess, stderr: see `paired_excess`; ``None`` where dense was not measured.
        divergence: how far predictions are from dense attention's, mean nats per token, see `Divergence`; ``None``
            where dense was not measured.
        copies, rest: mean loss in nats on tokens that were seen before, out of the adapter's window only (see
            `far_copies`), and on all others; ``None`` where there are none.
        scoring: what choosing costs beside the pairs, see `scoring_of`.
    """

    perplexity: float
    pairs: float
    positions: list[dict[str, float]] = field(default_factory=list)
    copies: float | None = None
    rest: float | None = None
    excess: float | None = None
    stderr: float | None = None
    scoring: dict[str, float] | None = None
    loaded: float | None = None
    divergence: float | None = None


def quality_table(
    model: nn.Module, windows: Tensor, top_ks: Iterable[int] | None = None, batch_size: int = 4
) -> Iterator[QualityRow]:
    """Measure dense, local-only and Focus attention, and windows with as many pairs as Focus, one row at a time.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        windows: token ids ``(N, T)``, each read from scratch, ``batch_size`` at a time.
        top_ks: values of ``top_k`` to measure; the adapter's own by default.
    """
    length = windows.shape[1]
    own = focus_layers(model)[0].routing_config.top_k
    modes = list_modes(["dense", "local", "hard", "window"], [own] if top_ks is None else top_ks)
    return measure_quality(model, SlidingWindows.of(windows.reshape(-1), length, length), modes, batch_size)


def measure_quality(
    model: nn.Module, text: SlidingWindows, modes: Sequence[Mode], batch_size: int = 4, count_scoring: bool = False
) -> Iterator[QualityRow]:
    """One `QualityRow` for each mode, dense first; an opponent without a width gets one by the pairs of Focus here.

    Args:
        model: with an active Focus adapter; it keeps its own settings.
        text: windows, read ``batch_size`` at a time.
        modes: see `list_modes`.
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
            own = scoring_of(model, Mode("hard"), length)
            mode = matched(mode, focus_pairs[setting], length, count_scoring, own.products if own else 0.0)
        compared = mode.name == "dense" or dense is not None
        with attending(model, mode, text.windows) as counted:
            losses = token_losses(model, text.windows, batch_size, divergence.look if compared else None)
            pairs, loaded = shares_read(model, mode, counted, text.windows)
        if mode.name == "dense":
            dense = losses
        if mode.name == "hard":
            focus_pairs[mode.top_k, mode.budget] = pairs
        excess, stderr = (None, None) if dense is None else paired_excess(losses, dense, text.scored)
        scoring = scoring_of(model, mode, length)
        yield QualityRow(
            **mode.columns,
            perplexity=text.perplexity(losses),
            pairs=pairs,
            positions=position_curve(losses),
            copies=_mean(losses[copies]),
            rest=_mean(losses[text.scored & ~copies]),
            excess=excess,
            stderr=stderr,
            scoring=None if scoring is None else asdict(scoring),
            loaded=loaded,
            divergence=divergence.mean(text.scored) if compared else None,
        )


def with_width(model: nn.Module, mode: Mode, text: Tensor, length: int) -> Mode:
    """A mode that can attend: an opponent without a width gets one by the pairs of Focus on a text ``(1, T)``."""
    if mode.name not in OPPONENTS or mode.width is not None:
        return mode
    return matched(mode, focus_share(model, mode, text), length)


def shares_read(model: nn.Module, mode: Mode, counted: Counted | None, windows: Tensor) -> tuple[float, float]:
    """Of the possible pairs those that are attended to, and of the keys those that are loaded for them.

    Counted inside `attending`: of an opponent on what it has read, of other modes on the first windows ``(N, T)``.
    """
    if mode.name in ("dense", "soft"):
        return 1.0, 1.0
    pairs = count_in(model, windows[:_COUNTED]) if counted is None else counted
    return pairs.share, pairs.loaded_share


def focus_share(model: nn.Module, mode: Mode, windows: Tensor) -> float:
    """The share of pairs that Focus attends to, at the ``top_k`` and budget of an opponent's mode."""
    with attending(model, replace(mode, name="hard"), windows):
        return attended_share(model, windows[:_COUNTED])


def matched(mode: Mode, share: float, length: int, count_scoring: bool = False, own: float = 0.0) -> Mode:
    """An opponent's mode with the width at which it reads as many pairs as Focus.

    Args:
        mode: of the opponent.
        share: of the pairs, of Focus in windows of ``length`` tokens.
        count_scoring: with what choosing costs Focus, ``own``, in products, less what it costs the opponent.

    Raises:
        ValueError: choosing alone costs more.
    """
    if count_scoring:
        share = min(1.0, less_scoring(share + own, selector_named(mode.name), length))  # nobody reads more than all
    return at_share(mode, share, length)


def scoring_of(model: nn.Module, mode: Mode, length: int) -> Cost | None:
    """What choosing costs beside the pairs in windows of a length; ``None`` but of opponents and of Focus by cells."""
    if mode.name in OPPONENTS:
        return selector_named(mode.name).cost(length)
    layers = focus_layers(model)
    config = layers[0].routing_config
    if mode.name != "hard" or not config.by_cells:
        return None
    # Each number of the adapter is one product of a token, and the group of each key one number that is read.
    # Keys and queries are multiplied by the centroids.
    heads, queries, size = config.key_value_heads, config.query_heads, config.head_dim
    assert heads and queries and size  # checked where the configuration met the model
    numbers = sum(tensor.numel() for tensor in layers[0].tensors_of(layers[0].active_adapters[0]))
    again = config.choosers * config.num_groups * config.group_dim
    return Cost(
        products=(numbers + again) / (queries * 2 * size) / ((length + 1) / 2),
        bytes=(numbers / heads + length) / (2 * size * length),
    )


def _mean(losses: Tensor) -> float | None:
    return losses.double().mean().item() if losses.numel() else None
