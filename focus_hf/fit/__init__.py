"""Making an adapter without training: routing fitted to a model's attention, head by head, under a budget of pairs.

- `recipe`: what is wanted; `run`: a whole fit
- `windows`, `capture`, `store`: text, and what attention layers see of it
- `importance`: what dense attention does at a query, and what leaving keys out would change
- `clusters`, `linear`, `query_router`, `routers`: groups of keys, and queries that read them
- `costs`, `layer`: what every way of attending costs a head; `budget`, `assemble`: which one it gets
"""

from .recipe import FitRecipe
from .run import FitResult, fit

__all__ = ["FitRecipe", "FitResult", "fit"]
