"""How the key/value heads of a layer attend under an adapter, and their routers where each has its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import routing
from ..attention import EVERYTHING, HeadClass, HeadClasses, Pattern, starts_of_rows
from ..settings import HeadPattern
from .config import FocusConfig


def key_value_heads(modules: Sequence[Any]) -> int:
    """How many key/value heads attention modules have.

    Raises:
        ValueError: their configuration does not say, or they differ.
    """
    counts = {_number_of_heads(module.config) for module in modules}
    if len(counts) == 1 and (found := counts.pop()) is not None:
        return found
    raise ValueError(
        f"The layers of {type(modules[0]).__name__} do not have one number of key/value heads that their "
        "configuration names, which an adapter with head_patterns or routing='per_head' needs."
    )


def _number_of_heads(config: Any) -> int | None:
    for name in ("num_key_value_heads", "num_attention_heads", "n_head"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    return None


def check_heads(config: FocusConfig, num_heads: int) -> None:
    """Raise `ValueError` if the adapter names a head that layers do not have."""
    tables = [config.head_patterns or {}, *(config.budgets or {}).values()]
    for name in sorted({name for table in tables for name in table}):
        if int(name.split(".")[1]) >= num_heads:
            raise ValueError(
                f"head_patterns names head {name}, but the layers of this model have {num_heads} key/value heads, "
                "counted from 0."
            )


def head_classes(config: FocusConfig, layer: int) -> HeadClasses:
    """The classes of a layer's heads, for an adapter whose heads do not all attend alike.

    With ``routing="per_head"`` the columns of memberships are those of each head that has centroids, in order. With
    shared routing they are those for each number of groups that some head asks for, ascending (`shared_top_ks`).

    Args:
        config: of the adapter, with ``key_value_heads``.
        layer: index of the layer.
    """
    made: HeadClasses = config.once(("classes", layer), lambda: _classes(config, layer))
    return made


def _classes(config: FocusConfig, layer: int) -> HeadClasses:
    alike: dict[HeadPattern, list[int]] = {}
    for head in range(int(config.key_value_heads or 0)):
        alike.setdefault(config.head_pattern(layer, head), []).append(head)
    per_head = config.routing == "per_head"
    # Whose columns there are: those of these heads, or those for these numbers of groups.
    places = list(config.heads_with_groups(layer)) if per_head else _top_ks(alike)
    classes = []
    for some, heads in alike.items():
        by_groups = some.attend == "groups"
        dense_below = EVERYTHING if some.attend == "everything" else config.dense_below
        found = (heads if per_head else [some.top_k]) if by_groups else []
        starts = [places.index(place) * config.num_groups for place in found]
        columns = tuple(slice(start, start + config.num_groups) for start in starts)
        pattern = Pattern(some.local_window, config.sink_tokens, dense_below)
        classes.append(HeadClass(tuple(heads), pattern, columns, some.top_k if per_head and by_groups else 0))
    return HeadClasses(classes)


def classes_of_part(classes: Sequence[HeadClass], key_heads: int, part: tuple[int, int] | None) -> HeadClasses:
    """The classes of the heads that one process has of a layer whose heads are split over several.

    Columns stay those of all heads: every process scores all tokens for all of them, since it has the hidden states
    whole.

    Args:
        classes: of all heads of the layer.
        key_heads: that this process has.
        part: which part of how many these are; each has as many heads, in order. ``None`` if that is not known.

    Raises:
        ValueError: it is not known which heads these are.
    """
    total = sum(len(some.kv_heads) for some in classes)
    if key_heads == total:
        return HeadClasses.of(classes)
    if part is None or key_heads * part[1] != total:
        raise ValueError(
            f"This process has {key_heads} of a layer's {total} key/value heads, and it is not known which. Split the "
            'model with transformers\' DistributedConfig(tp_plan="auto") over a number of processes that divides '
            f"{total}."
        )
    own = range(part[0] * key_heads, (part[0] + 1) * key_heads)
    mine = []
    for some in classes:
        places = [place for place, head in enumerate(some.kv_heads) if head in own]
        columns = some.columns if len(some.columns) <= 1 else tuple(some.columns[place] for place in places)
        if places:
            heads = tuple(some.kv_heads[place] - own.start for place in places)
            mine.append(replace(some, kv_heads=heads, columns=columns))
    return HeadClasses(mine)


def shared_top_ks(config: FocusConfig, layer: int) -> list[int]:
    """The numbers of groups per token that heads of a layer ask for, ascending."""
    return _top_ks(config.head_pattern(layer, head) for head in range(int(config.key_value_heads or 0)))


def _top_ks(how: Iterable[HeadPattern]) -> list[int]:
    return sorted({pattern.top_k for pattern in how if pattern.attend == "groups"})


def shared_columns(config: FocusConfig, layer: int, scores: Tensor, balance: Tensor) -> Tensor:
    """Memberships of tokens for all classes of heads (`head_classes`) of an adapter with shared routing.

    Args:
        config: of the adapter.
        layer: index of the layer.
        scores: ``(..., K)``.
        balance: ``(K,)``.

    Returns:
        bool ``(..., columns)``.
    """
    top_ks = [config.top_k] if config.plain else shared_top_ks(config, layer)
    columns = [routing.hard_memberships(scores, balance, top_k) for top_k in top_ks]
    return torch.cat([scores[..., :0].bool(), *columns], dim=-1)


def top_ks_by_head(config: FocusConfig, layer: int) -> list[int]:
    """How many groups each head with centroids reads."""
    made: list[int] = config.once(
        ("top_ks", layer),
        lambda: [config.head_pattern(layer, head).top_k for head in config.heads_with_groups(layer)],
    )
    return made


@dataclass(frozen=True)
class HeadScores:
    """Scores of tokens for the ``n`` heads of a layer that have centroids: float32 ``(B, T, n, K)`` each.

    Args:
        keys: ``(W_k h) . C / tau + b``; a token belongs to the group with the largest.
        queries: ``(W_q h) . C / tau + c``; it reads the groups with the largest.
    """

    keys: Tensor
    queries: Tensor

    def memberships(self) -> Tensor:
        """The group of each token: bool ``(B, T, n, K)``."""
        return own_groups(self.keys)

    def reads(self, top_ks: Sequence[int]) -> Tensor:
        """The groups that each token reads, ``top_ks[i]`` of head ``i``: bool ``(B, T, n, K)``."""
        best_first = self.queries.topk(max(top_ks), dim=-1).indices
        reads = torch.zeros_like(self.queries, dtype=torch.bool)
        if len(set(top_ks)) == 1:
            return reads.scatter_(-1, best_first, True)
        return reads.scatter_(-1, best_first, starts_of_rows(tuple(top_ks), like=best_first).expand(best_first.shape))


@dataclass(frozen=True)
class HeadRouters:
    """The tensors of the ``n`` heads of a layer that have centroids, float32 and in the shapes that they are used in.

    Args:
        key_projection, query_projection: ``W_k`` and ``W_q``, ``(n * d_g, d)``.
        centroids: ``C``, ``(n, d_g, K)``.
        balance, query_bias: ``b`` and ``c``, ``(n, 1, K)``.
        temperature: ``tau``.
    """

    key_projection: Tensor
    query_projection: Tensor
    centroids: Tensor
    balance: Tensor
    query_bias: Tensor
    temperature: float

    @classmethod
    def of(cls, tensors: Sequence[Tensor], temperature: float) -> HeadRouters:
        """Made of ``W_k``, ``W_q`` ``(n, d_g, d)``, ``C`` ``(n, K, d_g)``, ``b`` and ``c`` ``(n, K)``.

        Views, where these are float32: whatever happens to their values happens to them.
        """
        keys, queries, centroids, balance, bias = (tensor.float() for tensor in tensors)
        together = keys.flatten(0, 1), queries.flatten(0, 1), centroids.transpose(-1, -2)
        return cls(*together, balance[:, None], bias[:, None], temperature)


def own_groups(keys: Tensor) -> Tensor:
    """`HeadScores.memberships`, of these alone."""
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, keys.argmax(dim=-1, keepdim=True), True)


def head_scores(hidden_states: Tensor, routers: HeadRouters) -> HeadScores:
    """Score every token ``(B, T, d)``, as it enters the attention module, for every head, in float32 whatever the
    model's dtype."""
    return HeadScores(key_scores(hidden_states, routers), query_scores(hidden_states, routers))


def key_scores(hidden_states: Tensor, routers: HeadRouters) -> Tensor:
    """`HeadScores.keys` alone."""
    return _scores(hidden_states, routers.key_projection, routers.balance, routers)


def query_scores(hidden_states: Tensor, routers: HeadRouters) -> Tensor:
    """`HeadScores.queries` alone."""
    return _scores(hidden_states, routers.query_projection, routers.query_bias, routers)


def _scores(hidden_states: Tensor, projection: Tensor, bias: Tensor, routers: HeadRouters) -> Tensor:
    """``(B, T, d)`` by ``(n * d_g, d)`` by ``(n, d_g, K)``, and ``(n, 1, K)`` added, to ``(B, T, n, K)``."""
    heads, dim, num_groups = routers.centroids.shape
    batch, length, _ = hidden_states.shape
    with routing.without_autocast(hidden_states.device.type):
        projected = F.linear(hidden_states.float(), projection).view(batch * length, heads, dim)
        factor = 1.0 / routers.temperature
        scores = torch.baddbmm(bias, projected.transpose(0, 1), routers.centroids, alpha=factor)
    return scores.transpose(0, 1).view(batch, length, heads, num_groups)


@dataclass(frozen=True)
class HeadView:
    """One head of a layer that routes by itself, as observers see it in the layer's place.

    Args:
        name: of the attention module, with the head.
        layer_idx: index of the layer.
        head: which key/value head.
        routing_config: of the adapter in force.
        reads: the groups that each token of the call reads, bool ``(B, T, K)``; none where the head has groups under
            another budget only.
    """

    name: str
    layer_idx: int
    head: int
    routing_config: FocusConfig = field(compare=False, repr=False)
    reads: Tensor = field(compare=False, repr=False)

    @property
    def pattern(self) -> Pattern:
        """Its window, sinks and dense start."""
        how = self.routing_config.head_pattern(self.layer_idx, self.head)
        dense_below = EVERYTHING if how.attend == "everything" else self.routing_config.dense_below
        return Pattern(how.local_window, self.routing_config.sink_tokens, dense_below)
