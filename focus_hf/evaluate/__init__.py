"""Measure what an adapter keeps of the base model's quality, and what it saves."""

from .code_tasks.run import CodePlan, CodeRow, measure_code
from .figures import position_figure, quality_figure, retrieval_figure, ruler_figure
from .modes import MODES, OPPONENTS, Mode, at_share, attending, list_modes
from .perplexity import SlidingWindows, attended_share, far_copies, perplexity, position_curve, token_losses
from .quality import QualityRow, measure_quality, quality_table
from .retrieval import Haystack, RetrievalRow, probe_retrieval
from .ruler.run import RulerPlan, RulerRow, measure_ruler
from .run import EvaluationPlan, TokenText, evaluate

__all__ = [
    "MODES",
    "OPPONENTS",
    "CodePlan",
    "CodeRow",
    "EvaluationPlan",
    "Haystack",
    "Mode",
    "QualityRow",
    "RetrievalRow",
    "RulerPlan",
    "RulerRow",
    "SlidingWindows",
    "TokenText",
    "at_share",
    "attended_share",
    "attending",
    "evaluate",
    "far_copies",
    "list_modes",
    "measure_code",
    "measure_quality",
    "measure_ruler",
    "perplexity",
    "position_curve",
    "position_figure",
    "probe_retrieval",
    "quality_figure",
    "quality_table",
    "retrieval_figure",
    "ruler_figure",
    "token_losses",
]
