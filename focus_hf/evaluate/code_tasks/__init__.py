"""Tasks on code where far tokens decide, made of the standard library: nothing is downloaded."""

from .completion import CompletionPrompt, make_completion_prompts
from .names import NamesPrompt, SecondUse, make_names_prompts, second_uses
from .run import DISTANCES, TASKS, CodePlan, CodeRow, losses_of, measure_code

__all__ = [
    "DISTANCES",
    "TASKS",
    "CodePlan",
    "CodeRow",
    "CompletionPrompt",
    "NamesPrompt",
    "SecondUse",
    "losses_of",
    "make_completion_prompts",
    "make_names_prompts",
    "measure_code",
    "second_uses",
]
