"""What a fit takes, from shapes: memory, scratch, passes over the text, and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from .minimize import BATCH
from .recipe import FitRecipe

#: Numbers of a token that a layer keeps for its backward pass, in units of the hidden size: norms, projections and the
#: feed-forward part of a gated layer.
_KEPT_BY_A_LAYER = 16

#: The same of a layer whose activations are computed again, with what is captured of it: measured on models of 2 and
#: of 30 layers of 576 (2.3 and 6.3 GB for 8,192 tokens in float32).
_KEPT_BY_A_CHECKPOINT = 8

#: What a layer's fit computes for a score of attention (weights, effects, their sums by cell), and what training does
#: for a cell of a query, in floating-point operations of a matrix product that would take as long.
_PER_SCORE, _PER_CELL = 2000, 2000


@dataclass(frozen=True)
class Shapes:
    """Of a model, as its configuration says.

    Args:
        layers: routed.
        hidden, vocabulary: widths.
        heads, kv_heads, head_dim: of attention.
        parameters: of the whole model.
    """

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int

    @classmethod
    def of(cls, config: Any, layers: int, parameters: int) -> Shapes:
        """From a transformers configuration."""
        heads = int(getattr(config, "num_attention_heads", 1))
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(layers, int(config.hidden_size), int(config.vocab_size), heads, kv_heads, size, parameters)

    def bytes_of_window(self, length: int, rows: int) -> int:
        """About how much one layer's captured tensors of a window take on disk."""
        return 2 * self.head_dim * (3 * self.kv_heads * length + 2 * self.heads * min(rows, length))


@dataclass(frozen=True)
class Needs:
    """What a fit takes.

    Args:
        at_once: layers whose captured tensors find room together.
        scratch: bytes of these on disk.
        passes: over all windows, each capturing some of the layers.
        memory: bytes in memory while the longest window is captured, weights included.
        layer: bytes in memory while a layer is fitted, without the model's weights.
        operations: floating-point operations of the capture and of the fit.
    """

    at_once: int
    scratch: int
    passes: int
    memory: int
    layer: int
    operations: float

    def in_words(self, rate: float) -> str:
        """What a fit is going to take, in one line, at a rate of operations a second."""
        return (
            f"this takes about {duration(self.operations / rate)}, {decimal(self.memory)} of memory to run windows of "
            f"text and {decimal(self.layer)} more to fit a layer, and {decimal(self.scratch)} of scratch; Ctrl-C "
            "keeps the layers that are done, and --resume goes on"
        )


def duration(seconds: float) -> str:
    """Roughly."""
    if seconds < 90:
        return f"{max(1, round(seconds / 10)) * 10} seconds"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"


def needs(shapes: Shapes, recipe: FitRecipe, bytes_per_number: int) -> Needs:
    """What a fit takes, with weights of so many bytes per number (2 for bfloat16)."""
    lengths, longest = recipe.lengths, max(recipe.lengths)
    each = sum(shapes.bytes_of_window(length, recipe.rows) for length in lengths)
    at_once = max(1, min(shapes.layers, int(recipe.scratch_gb * 1e9 / max(1, each))))
    passes = -(-shapes.layers // at_once)
    kept = _KEPT_BY_A_LAYER * shapes.hidden * longest * bytes_per_number
    activations = kept * (1 + shapes.layers * _KEPT_BY_A_CHECKPOINT / _KEPT_BY_A_LAYER)
    if not recipe.gradient_checkpointing:
        activations = shapes.layers * kept
    logits = bytes_per_number * longest * shapes.vocabulary  # their gradient is made in their place
    queries = sum(min(length, recipe.rows) for length in lengths)
    cells = recipe.num_groups * recipe.num_bands + 1
    # Capturing: a pass forward and one backward, and a second forward where activations are computed again.
    # Attention's kernels run at a lower rate than matrix products.
    scores = 2.0 * shapes.layers * shapes.heads * shapes.head_dim * sum(length**2 for length in lengths)
    forward = 2.0 * shapes.parameters * sum(lengths) + 2 * scores
    capturing = passes * (3 if recipe.gradient_checkpointing else 2) * forward
    # Fitting: scores of the queries that were kept, and steps of training.
    kept_scores = shapes.heads * sum(min(length, recipe.rows) * length / 2 for length in lengths)
    choosers = shapes.heads if recipe.each_query_head else shapes.kv_heads
    training = choosers * recipe.steps * BATCH * cells
    # Importance of the cells of all choosers of a key head; then, of one, weights, effects and pairs, twice.
    by_cell = max(5 * choosers // shapes.kv_heads, 2 * (2 * shapes.heads // choosers + 1))
    return Needs(
        at_once=at_once,
        scratch=at_once * each,
        passes=passes,
        memory=int(shapes.parameters * bytes_per_number + activations + logits),
        layer=2 * each + 4 * by_cell * queries * cells,
        operations=capturing + shapes.layers * (_PER_SCORE * kept_scores + _PER_CELL * training),
    )
