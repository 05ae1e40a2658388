"""PEFT's tuner layer: the centroids of one attention module, and the settings by which it is routed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import routing
from ..attention import HARD_GATE, HeadClass, Kernel, Pattern, WhoAttends
from .config import FocusConfig
from .discovery import slides
from .heads import HeadRouters, HeadScores, HeadView, head_scores

#: Scale of fresh centroids: scores of unit-variance hidden states start with a spread of a few units.
CENTROID_GAIN = 0.3


#: The tensors of heads that route for themselves, as `HeadRouters` takes them.
_OF_HEADS = ("focus_proj", "focus_query_proj", "focus_centroids", "focus_balance", "focus_query_bias")

#: Those of a routing that all heads share.
_SHARED = ("focus_proj", "focus_centroids", "focus_balance")

#: Scores in the place of a layer's own, to compare the adapter with: of the layer's index, a number of heads, the
#: place of the first new token and how many there are; float32 ``(B or 1, T, heads, K)``. See `routing_by`.
StandIn = Callable[[int, int, int, int], Tensor]


class FocusLayer(nn.Module, BaseTunerLayer):
    """Centroids of one attention module.

    It sits *beside* the projections of the attention module, as its child ``group_router``, and acts through forward
    hooks (`add_hooks`). So parameter names of the base model stay as they are, and LoRA can target ``q_proj`` in any
    order.

    Per adapter it holds ``focus_proj`` (``W_g``, ``(d_g, d)``), ``focus_centroids`` (``C``, ``(K, d_g)``) and
    ``focus_balance`` (``b``, ``(K,)``; not trained by gradient). With ``routing="per_head"`` they have one dimension
    more, the first, of the key/value heads that have groups; ``focus_proj`` is that of keys then, and
    ``focus_query_proj`` and ``focus_query_bias`` are those of queries.

    Args:
        attention: the module.
        name: in the model.
        layer_idx: its number, see `discovery.layer_numbers`.
    """

    adapter_layer_names = ("focus_proj", "focus_centroids", "focus_query_proj")
    other_param_names = ("focus_balance", "focus_query_bias")

    def __init__(self, attention: nn.Module, name: str, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.slides = slides(attention)
        #: Later layers read this layer's keys, as in Gemma 3n: they must then stay in their order.
        self.shares_keys = bool(getattr(getattr(attention, "config", None), "num_kv_shared_layers", 0))
        self._attention: tuple[Any] = (attention,)  # in a tuple: the parent must not become a submodule of its child
        self.name = name
        self.focus_proj = nn.ParameterDict()
        self.focus_centroids = nn.ParameterDict()
        self.focus_balance = nn.ParameterDict()
        self.focus_query_proj = nn.ParameterDict()
        self.focus_query_bias = nn.ParameterDict()
        self.configs: dict[str, FocusConfig] = {}
        self.mode: str | None = None
        self.window: int | None = None  # width of mode "window"
        self.stand_in: StandIn | None = None
        self.path = "auto"
        self.kernel: Kernel | None = None
        self.gate_strength: float | None = None
        self.balance_rate = routing.BALANCE_RATE
        self.observer: Callable[[Any, Tensor, Tensor], None] | None = None
        self.attention_observer: Callable[[Any, Tensor, Tensor, float, Tensor], None] | None = None
        self.pairs_observer: Callable[[WhoAttends, Sequence[HeadClass] | None], None] | None = None
        self.hooks: list[RemovableHandle] = []
        self.balance_steps: deque[Tensor] = deque(maxlen=256)  # where several processes train
        self._checked: set[str] = set()
        self._put_together: tuple[list[int], HeadRouters] | None = None
        #: See `one_token`; forgotten as soon as an attribute of the layer is set.
        self.for_single_tokens: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Also forget what follows from the layer's settings for single tokens."""
        super().__setattr__(name, value)
        self.__dict__["for_single_tokens"] = None

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

    def update_layer(self, adapter_name: str, config: FocusConfig) -> None:
        """Add an adapter, with fresh centroids.

        An adapter that is about to be loaded starts as NaN, so that a tensor missing from the file is noticed.
        """
        self.configs[adapter_name] = config
        for kind, shape in config.tensor_shapes(self.layer_idx).items():
            tensor = torch.zeros(shape)
            if kind in self.adapter_layer_names:
                if config.inference_mode:
                    tensor.fill_(float("nan"))
                elif kind == "focus_centroids":
                    for centroids in tensor.view(-1, *shape[-2:]):
                        nn.init.orthogonal_(centroids, gain=CENTROID_GAIN)
                else:
                    nn.init.normal_(tensor, std=shape[-1] ** -0.5)
            learned = kind in self.adapter_layer_names
            getattr(self, kind)[adapter_name] = nn.Parameter(tensor, requires_grad=learned)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def tensors_of(self, adapter_name: str) -> list[nn.Parameter]:
        """All tensors of an adapter."""
        kinds = (getattr(self, kind) for kind in (*self.adapter_layer_names, *self.other_param_names))
        return [kind[adapter_name] for kind in kinds if adapter_name in kind]

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, None]:
        """Centroids go where the attention's weights are used, and keep their own dtype.

        Packed weights (GPTQ, AWQ) are buffers; offloaded ones are nowhere until a hook of accelerate brings them.
        """
        hooks = (getattr(module, "_hf_hook", None) for module in base_layer.modules())
        for hook in hooks:
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device), None
        own = {id(p) for p in self.parameters()}
        weights = (w for w in chain(base_layer.parameters(), base_layer.buffers()) if id(w) not in own)
        device = next((weight.device for weight in weights), None)
        return (None if device is None or device.type == "meta" else device), None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        for kind in self.other_param_names:
            for tensor in getattr(self, kind).values():
                tensor.requires_grad_(False)

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
        for handle in self.hooks:
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

    @property
    def pattern(self) -> Pattern:
        """Window, sinks and dense start of the adapter in force."""
        return self.routing_config.pattern

    def forward(self, hidden_states: Tensor, adapter_name: str) -> tuple[Tensor, Tensor]:
        """Scores of every token against every centroid, and the balance potentials.

        Parameters are read here and nowhere else in a forward pass, so that FSDP may wrap this module by itself.

        Args:
            hidden_states: ``(B, T, d)``.
            adapter_name: whose centroids.

        Returns:
            float32 ``(B, T, K)`` and float32 ``(K,)``, the latter without gradient.
        """
        self.check_finite(adapter_name)
        scores = routing.group_scores(
            hidden_states,
            self.focus_proj[adapter_name],
            self.focus_centroids[adapter_name],
            self.configs[adapter_name].temperature,
        )
        return scores, self.focus_balance[adapter_name].detach().float().clone()

    def balanced_scores(self, tokens: Tensor, adapter_name: str) -> Tensor:
        """The scores of single tokens ``(B, d)`` with the balance potentials added: float32 ``(B, K)``.

        Parameters are not checked here.
        """
        kinds: dict[str, Any] = self._modules  # without torch's search among names
        proj, centroids, balance = (kinds[kind]._parameters[adapter_name] for kind in _SHARED)
        return routing.balanced_scores(tokens, proj, centroids, self.configs[adapter_name].temperature, balance)

    def head_scores(self, hidden_states: Tensor, adapter_name: str) -> HeadScores | None:
        """Scores of every token for every head with groups, for an adapter with ``routing="per_head"``.

        Returns:
            ``None`` in a layer without groups.
        """
        if adapter_name not in self.focus_proj:
            return None
        return head_scores(hidden_states, self.head_routers(adapter_name))

    def head_routers(self, adapter_name: str) -> HeadRouters:
        """Its tensors, put together once for each place in memory that they have."""
        kinds: dict[str, Any] = self._modules  # without torch's search among names, here and below
        tensors: list[Any] = [kinds[kind]._parameters[adapter_name] for kind in _OF_HEADS]
        temperature, kept = self.configs[adapter_name].temperature, self._put_together
        may_keep = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        is_same = kept is not None and may_keep and kept[1].temperature == temperature
        if is_same and kept is not None and kept[0] == [tensor.data_ptr() for tensor in tensors]:
            return kept[1]
        self.check_finite(adapter_name)
        routers = HeadRouters.of(tensors, temperature)
        if may_keep and all(type(tensor) is nn.Parameter and tensor.dtype == torch.float32 for tensor in tensors):
            self.__dict__["_put_together"] = [tensor.data_ptr() for tensor in tensors], routers
        return routers

    def head_view(self, head: int, reads: Tensor) -> HeadView:
        """What observers are told in the place of this layer, for a key/value head that routes by itself."""
        config = self.routing_config
        if config.head_pattern(self.layer_idx, head).attend != "groups":
            reads = torch.zeros_like(reads)
        return HeadView(f"{self.name}.{head}", self.layer_idx, head, config, reads)

    def check_finite(self, adapter_name: str) -> None:
        """Once per adapter: damaged or missing tensors must not quietly route at random."""
        if adapter_name in self._checked:
            return
        own = self.tensors_of(adapter_name)
        # transformers flags what it loaded, and leaves a tensor that the file lacks as uninitialised memory.
        all_or_none = len({getattr(tensor, "_is_hf_initialized", False) for tensor in own}) == 1
        # detach(): a check that happens once must not differ between a forward and its recomputation.
        if not all_or_none or not all(bool(torch.isfinite(tensor.detach()).all()) for tensor in own):
            raise ValueError(
                f"Adapter {adapter_name!r} has missing or non-finite centroids in {self.name}: its file is incomplete "
                "or its training diverged. Download it again, or train with a lower learning rate."
            )
        self._checked.add(adapter_name)

    def learns(self, adapter_name: str, *, starts: bool) -> bool:
        """Whether a call gives gradients to an adapter's centroids: in training, and in eval mode where that changes
        no value, with the hard gate.

        Args:
            adapter_name: whose centroids.
            starts: the call starts its sequences. One that continues a cache cannot, and is an error in training only.
        """
        if not torch.is_grad_enabled():
            return False
        centroids = self.focus_centroids.get(adapter_name)
        if centroids is None or not centroids.requires_grad:
            return False
        config = self.configs[adapter_name]
        return self.training or (starts and config.plain and config.gate == HARD_GATE)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}: K={c.num_groups}, top_k={c.top_k}, window={c.local_window}" for name, c in self.configs.items()
        )
