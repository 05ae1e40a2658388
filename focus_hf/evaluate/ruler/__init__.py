"""RULER's synthetic tasks: answers that need what was said far back."""

from .prompts import Prompt, make_prompts
from .run import RulerPlan, RulerRow, measure_ruler, ruler_modes
from .tasks import TASKS, Example, Task, string_match_all, string_match_part

__all__ = [
    "TASKS",
    "Example",
    "Prompt",
    "RulerPlan",
    "RulerRow",
    "Task",
    "make_prompts",
    "measure_ruler",
    "ruler_modes",
    "string_match_all",
    "string_match_part",
]
