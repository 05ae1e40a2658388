"""Making an adapter without training: cells, fitted to a model's own attention, layer by layer.

- `recipe`: what is wanted; `run`: a whole fit; `estimate`: what it takes, said beforehand
- `kept`: where it writes, and fitted layers that are there already
- `windows`, `capture`: text, and what attention layers see of it
- `importance`: what dense attention does at a query, what leaving keys out would change, and sums of it by cell
- `clusters`: groups of keys; `query_router`: which of them matter to a query, at which distance; `lower_cost`: and
  which it reads, by what that saves and costs
- `layer`: one layer, fitted; `curves`, `dial`: from thresholds to pairs and loss, of each head and of all
"""

from typing import TYPE_CHECKING, Any

from .recipe import FitRecipe

if TYPE_CHECKING:
    from .run import FitResult, fit

__all__ = ["FitRecipe", "FitResult", "fit"]


def __getattr__(name: str) -> Any:
    """What needs torch and PEFT is imported when it is asked for: the command line shows a recipe's flags without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import run

    return getattr(run, name)
