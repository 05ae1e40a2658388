"""One routed attention layer: its centroids, and the hooks by which the attention module follows them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .. import ranks, routing
from ..attention import HARD_GATE, Kernel, Pattern
from .cache import append_memberships, cache_layer, find_cache, follows, tokens_seen
from .call import RoutedConfig, Routing, SoftGate
from .config import FocusConfig

#: ``None`` lets the layer decide: soft while its centroids train, hard otherwise. "local" switches groups off and
#: keeps window and sinks: what is left without the adapter's contribution. "dense" routes nothing.
MODES = (None, "soft", "hard", "local", "dense")


class FocusLayer(nn.Module, BaseTunerLayer):
    """Centroids of one attention module.

    It sits *beside* the projections of the attention module, as its child ``group_router``, and acts through forward
    hooks. So parameter names of the base model stay as they are, and LoRA can target ``q_proj`` in any order.

    Per adapter it holds ``focus_proj`` (``W_g``, ``(d_g, d)``), ``focus_centroids`` (``C``, ``(K, d_g)``) and
    ``focus_balance`` (``b``, ``(K,)``; not trained by gradient).
    """

    adapter_layer_names = ("focus_proj", "focus_centroids")
    other_param_names = ("focus_balance",)

    def __init__(self, attention: nn.Module, name: str) -> None:
        super().__init__()
        self._attention: tuple[Any] = (attention,)  # in a tuple: the parent must not become a submodule of its child
        self.name = name
        self.focus_proj = nn.ParameterDict()
        self.focus_centroids = nn.ParameterDict()
        self.focus_balance = nn.ParameterDict()
        self.configs: dict[str, FocusConfig] = {}
        self.mode: str | None = None
        self.path = "auto"
        self.kernel: Kernel | None = None
        self.gate_strength: float | None = None
        self.balance_rate = routing.BALANCE_RATE
        self.observer: Callable[[FocusLayer, Tensor, Tensor], None] | None = None
        self.attention_observer: Callable[[FocusLayer, Tensor, Tensor, float, Tensor], None] | None = None
        self._checked: set[str] = set()
        self._steps: deque[Tensor] = deque(maxlen=256)  # of the balance potentials, where several processes train
        self._handles = [
            attention.register_forward_pre_hook(self._before_attention, with_kwargs=True),
            attention.register_forward_hook(self._after_attention, always_call=True),
        ]

    # -- PEFT ------------------------------------------------------------------------------------------------------

    def get_base_layer(self) -> Any:
        """The attention module that this layer routes."""
        return self._attention[0]

    @property
    def weight(self) -> Tensor:  # BaseTunerLayer would look for it on the base layer and find itself
        raise AttributeError("FocusLayer has no weight")

    @property
    def bias(self) -> Tensor:
        raise AttributeError("FocusLayer has no bias")

    def update_layer(self, adapter_name: str, config: FocusConfig, hidden_size: int) -> None:
        """Add an adapter, with fresh centroids.

        An adapter that is about to be loaded starts as NaN, so that a tensor missing from the file is noticed.
        """
        self.configs[adapter_name] = config
        projection = torch.empty(config.group_dim, hidden_size)
        centroids = torch.empty(config.num_groups, config.group_dim)
        if config.inference_mode:
            projection.fill_(float("nan"))
            centroids.fill_(float("nan"))
        else:
            nn.init.normal_(projection, std=hidden_size**-0.5)
            nn.init.orthogonal_(centroids, gain=CENTROID_GAIN)
        self.focus_proj[adapter_name] = nn.Parameter(projection)
        self.focus_centroids[adapter_name] = nn.Parameter(centroids)
        self.focus_balance[adapter_name] = nn.Parameter(torch.zeros(config.num_groups), requires_grad=False)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, None]:
        """Centroids go where the attention's weights are, and keep their own dtype."""
        own = {id(p) for p in self.parameters()}
        device = next((p.device for p in base_layer.parameters() if id(p) not in own), None)
        return (None if device is None or device.type == "meta" else device), None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        for balance in self.focus_balance.values():
            balance.requires_grad_(False)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)
        self._checked.discard(adapter_name)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "A Focus adapter changes which tokens attend to each other, not the weights, so it cannot be merged. "
            "Use unload() to get the base model back."
        )

    def remove(self) -> None:
        """Take the hooks off the attention module."""
        for handle in self._handles:
            handle.remove()

    # -- routing ---------------------------------------------------------------------------------------------------

    @property
    def routing_adapter(self) -> str | None:
        """The Focus adapter in force, or ``None`` (disabled, or only adapters of other types are active)."""
        if self.disable_adapters:
            return None
        active = [name for name in self.active_adapters if name in self.configs]
        if len(active) > 1:
            raise ValueError(
                f"Two Focus adapters are active at once ({', '.join(active)}), but a token can only follow one. "
                "Activate one of them with set_adapter()."
            )
        return active[0] if active else None

    @property
    def routing_config(self) -> FocusConfig:
        """Configuration of the adapter in force.

        Raises:
            ValueError: there is none.
        """
        name = self.routing_adapter
        if name is None:
            raise ValueError("No layer was routed: the Focus adapter is not active.")
        return self.configs[name]

    def forward(self, hidden_states: Tensor, adapter_name: str) -> tuple[Tensor, Tensor]:
        """Scores of every token against every centroid, and the balance potentials.

        Parameters are read here and nowhere else in a forward pass, so that FSDP may wrap this module by itself.

        Args:
            hidden_states: ``(B, T, d)``.
            adapter_name: whose centroids.

        Returns:
            float32 ``(B, T, K)`` and float32 ``(K,)``, the latter without gradient.
        """
        self._check_finite(adapter_name)
        scores = routing.group_scores(
            hidden_states,
            self.focus_proj[adapter_name],
            self.focus_centroids[adapter_name],
            self.configs[adapter_name].temperature,
        )
        return scores, self.focus_balance[adapter_name].detach().float().clone()

    def _check_finite(self, adapter_name: str) -> None:
        """Once per adapter: damaged or missing tensors must not quietly route at random."""
        if adapter_name in self._checked:
            return
        kinds = (self.focus_proj, self.focus_centroids, self.focus_balance)
        # transformers flags what it loaded, and leaves a tensor that the file lacks as uninitialised memory.
        all_or_none = len({getattr(kind[adapter_name], "_is_hf_initialized", False) for kind in kinds}) == 1
        # detach(): a check that happens once must not differ between a forward and its recomputation.
        if not all_or_none or not all(bool(torch.isfinite(kind[adapter_name].detach()).all()) for kind in kinds):
            raise ValueError(
                f"Adapter {adapter_name!r} has missing or non-finite centroids in {self.name}: its file is incomplete "
                "or its training diverged. Download it again, or train with a lower learning rate."
            )
        self._checked.add(adapter_name)

    def _is_soft(self, adapter_name: str) -> bool:
        if self.mode is not None:
            return self.mode == "soft"
        return self.training and torch.is_grad_enabled() and self.focus_centroids[adapter_name].requires_grad

    def _before_attention(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        adapter_name = self.routing_adapter
        if adapter_name is None or self.mode == "dense":
            return
        if "read_index" in kwargs or "block_table" in kwargs:  # what its paged cache hands to attention modules
            raise ValueError(
                "Focus does not route continuous batching (generate_batch, paged caches): its output would be wrong. "
                "Use generate(), or switch the adapter off."
            )
        hidden_states = args[0] if args else kwargs["hidden_states"]
        cache = find_cache((*args, *kwargs.values()))
        call = self._route(adapter_name, hidden_states, cache, kwargs.get("attention_mask"))
        if call is not None:
            attention.config = RoutedConfig(attention.config, call)

    def _after_attention(self, attention: Any, args: tuple, output: Any) -> None:
        if isinstance(attention.config, RoutedConfig):
            attention.config = attention.config.original

    def _route(self, adapter_name: str, hidden_states: Tensor, cache: Any, mask: Any) -> Routing | None:
        """The routing of this call, or ``None`` where every pair is attended and the base model's attention is it."""
        config = self.configs[adapter_name]
        pattern = Pattern(config.local_window, config.sink_tokens, config.dense_below)
        layer = None if cache is None else cache_layer(cache, self.get_base_layer().layer_idx)
        total = hidden_states.shape[1] + (0 if layer is None else tokens_seen(layer))
        all_attended = total <= pattern.dense_length
        if self._is_soft(adapter_name):
            if total > hidden_states.shape[1]:
                raise ValueError(
                    "Soft routing looks at whole sequences and cannot continue a cache. Generate in hard mode: "
                    'focus_hf.set_routing(model, mode="hard").'
                )
            return None if all_attended else self._soft_routing(adapter_name, hidden_states, pattern, mask)
        # More than half of all groups each: any two tokens share one.
        all_attended = all_attended or (
            self.mode != "local" and layer is None and 2 * config.top_k > config.num_groups
        )
        if all_attended and layer is None and self.observer is None:
            return None
        return self._hard_routing(adapter_name, hidden_states, pattern, layer, all_attended)

    @torch.no_grad()
    def _hard_routing(
        self, adapter_name: str, hidden_states: Tensor, pattern: Pattern, layer: Any, all_attended: bool
    ) -> Routing | None:
        config = self.configs[adapter_name]
        scores, balance = self(hidden_states, adapter_name)
        memberships = routing.hard_memberships(scores, balance, config.top_k)
        if self.mode == "local":
            memberships = torch.zeros_like(memberships)
        if self.observer is not None:
            self.observer(self, scores, memberships)
        in_stores = layer is not None and follows(layer, pattern, adapter_name, memberships.shape[0])
        if in_stores and all_attended:
            layer.restore()
            in_stores = False
        if layer is not None and not in_stores:
            memberships = append_memberships(layer, memberships, owner=adapter_name)
            if 2 * config.top_k > config.num_groups:  # earlier tokens may have had fewer
                all_attended = all_attended or 2 * int(memberships.sum(dim=-1).min()) > config.num_groups
        if all_attended:
            return None
        if in_stores:
            layer.routed = True
        return Routing(
            pattern,
            memberships,
            config.top_k,
            self.path,
            self.kernel,
            cache_layer=None if self._shares_keys() else layer,
            in_stores=in_stores,
            owner=adapter_name,
            attention_observer=None if (observer := self.attention_observer) is None else partial(observer, self),
        )

    def _shares_keys(self) -> bool:
        """Whether later layers read this layer's keys, as in Gemma 3n: they must then stay in their order."""
        return bool(getattr(self.get_base_layer().config, "num_kv_shared_layers", 0))

    def _soft_routing(self, adapter_name: str, hidden_states: Tensor, pattern: Pattern, mask: Any) -> Routing:
        config = self.configs[adapter_name]
        scores, balance = self(hidden_states, adapter_name)
        valid = _valid_tokens(mask)
        factor = routing.sharpening(scores, config.training_sharpness, valid)
        assignments, potentials = routing.balanced_assignments(
            factor * scores, factor * balance, config.sinkhorn_iterations, valid
        )
        if self.training and scores.requires_grad:
            step = routing.balance_step(scores, balance, config.top_k, valid, self.balance_rate)
            step = torch.where(balance.any(), step, (potentials / factor).mean(dim=(0, 1)))  # Sinkhorn's to start from
            # In the backward pass: gradient checkpointing computes this forward twice, and both must agree.
            assignments.register_hook(lambda gradient: self._update_balance(adapter_name, step))
        hard = routing.hard_memberships(scores.detach(), balance, config.top_k)
        if self.observer is not None:
            self.observer(self, scores.detach(), hard)
        if config.straight_through or config.gate == HARD_GATE:
            assignments = routing.straight_through(hard, assignments)
        strength = config.gate_strength if self.gate_strength is None else self.gate_strength
        return Routing(
            pattern, hard, config.top_k, kernel=self.kernel, soft=SoftGate(assignments, config.gate, strength)
        )

    @torch.no_grad()
    def _update_balance(self, adapter_name: str, step: Tensor) -> None:
        """Move the balance potentials, which inference adds to the scores in the place of Sinkhorn."""
        balance = self.focus_balance[adapter_name]
        if not ranks.in_shards(balance):
            balance.add_(step.to(balance.dtype))
        if ranks.several():  # under FSDP that was a passing copy of the shards
            self._steps.append(step)

    @torch.no_grad()
    def agree_on_balance(self) -> None:
        """Make the balance potentials the mean over all ranks; every rank must call it, after its backward pass.

        Steps are means over sequences, so this is what one process with all sequences would have.
        """
        adapter_name = self.routing_adapter
        if adapter_name is None:
            return
        parameter = self.focus_balance[adapter_name]
        balance = ranks.whole(parameter)
        if ranks.in_shards(parameter):
            balance = balance + sum(self._steps)
        self._steps.clear()
        ranks.assign(parameter, ranks.mean(balance))

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}: K={c.num_groups}, top_k={c.top_k}, window={c.local_window}" for name, c in self.configs.items()
        )


#: Scale of fresh centroids: scores of unit-variance hidden states start with a spread of a few units.
CENTROID_GAIN = 0.3


def _valid_tokens(mask: Any) -> Tensor | None:
    """``(B, T)`` bool, ``False`` for padding, or ``None`` if nothing is known to be padding."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 4:
        mask = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, -1]
    return mask.bool()


def focus_layers(model: nn.Module) -> list[FocusLayer]:
    """The Focus layers of a model, in order.

    Raises:
        ValueError: the model has none.
    """
    layers = [module for module in model.modules() if isinstance(module, FocusLayer)]
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no Focus adapter. Load one with model.load_adapter(...) or add one with "
            "get_peft_model(model, focus_hf.FocusConfig())."
        )
    return layers


def warn_if_inactive(layers: list[FocusLayer]) -> None:
    """Warn when settings are changed on a model whose adapter is switched off."""
    if all(layer.routing_adapter is None for layer in layers):
        warnings.warn("The Focus adapter is not active, so the model runs dense attention.", stacklevel=3)
