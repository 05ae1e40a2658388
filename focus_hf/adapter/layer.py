"""PEFT's tuner layer: the centroids of one attention module, and the settings by which it is routed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import routing
from ..attention import Kernel, Pattern
from ..routing.cells import CellRouter
from .config import FocusConfig
from .discovery import slides
from .remembered import state_of

#: Scale of fresh centroids: scores of unit-variance hidden states start with a spread of a few units.
CENTROID_GAIN = 0.3

#: The tensors of a `CellRouter`, by its fields.
OF_CELLS = {
    "key_projection": "focus_key_proj",
    "centroids": "focus_centroids",
    "balance": "focus_balance",
    "query_projection": "focus_query_proj",
    "band_projection": "focus_band_proj",
    "cell_bias": "focus_cell_bias",
    "offset": "focus_offset",
}


class FocusLayer(nn.Module, BaseTunerLayer):
    """Centroids of one attention module.

    It sits *beside* the projections of the attention module, as its child ``group_router``, and acts through forward
    hooks. So parameter names of the base model stay as they are, and LoRA can target ``q_proj`` in any order.

    Per adapter it holds ``focus_proj`` (``W_g``, ``(d_g, d)``), ``focus_centroids`` (``C``, ``(K, d_g)``) and
    ``focus_balance`` (``b``, ``(K,)``; not trained by gradient); with ``routing="cells"`` the tensors of a
    `CellRouter`, none of which is trained by gradient.

    Args:
        attention: the module.
        name: in the model.
        layer_idx: its number, see `discovery.layer_numbers`.
        rotary: what makes the angles of the model's rotary positions, if anything.
    """

    adapter_layer_names = ("focus_proj", "focus_centroids", "focus_key_proj", "focus_query_proj", "focus_band_proj")
    other_param_names = ("focus_balance", "focus_cell_bias", "focus_offset")
    kinds = (*adapter_layer_names, *other_param_names)

    focus_proj: nn.ParameterDict
    focus_centroids: nn.ParameterDict
    focus_balance: nn.ParameterDict
    focus_offset: nn.ParameterDict

    def __init__(self, attention: nn.Module, name: str, layer_idx: int, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.slides = slides(attention)
        self._outside: tuple[Any, Any] = attention, rotary  # in a tuple: the parent must not become a submodule
        self.name = name
        for kind in self.kinds:
            setattr(self, kind, nn.ParameterDict())
        self.configs: dict[str, FocusConfig] = {}
        self.mode: str | None = None
        self.window: int | None = None  # width of mode "window"
        self.answer_pairs: float | None = None  # of the last tokens of a call, see `dial.limits`
        self.path = "auto"
        self.kernel: Kernel | None = None
        self.gate_strength: float | None = None
        self.balance_rate = routing.BALANCE_RATE
        self.observer: Callable[[Any, Tensor, Tensor], None] | None = None
        self.attention_observers: tuple[Callable[[Any], None], ...] = ()
        self.hooks: list[RemovableHandle] = []
        self.balance_steps: deque[Tensor] = deque(maxlen=256)  # where several processes train
        self._checked: set[str] = set()
        self._cells: tuple[Any, CellRouter] | None = None

    # -- PEFT ------------------------------------------------------------------------------------------------------

    def get_base_layer(self) -> Any:
        """The attention module that this layer routes."""
        return self._outside[0]

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
        for kind, shape in config.tensor_shapes().items():
            tensor = torch.zeros(shape, dtype=torch.float16 if config.by_cells else torch.float32)
            if kind in self.adapter_layer_names:
                if config.inference_mode:
                    tensor.fill_(float("nan"))
                elif kind == "focus_centroids" and not config.by_cells:
                    nn.init.orthogonal_(tensor, gain=CENTROID_GAIN)
                else:
                    nn.init.normal_(tensor, std=shape[-1] ** -0.5)
            getattr(self, kind)[adapter_name] = nn.Parameter(tensor)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def tensors_of(self, adapter_name: str) -> list[nn.Parameter]:
        """All tensors of an adapter."""
        return [kind[adapter_name] for name in self.kinds if adapter_name in (kind := getattr(self, name))]

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, None]:
        """Centroids go where the attention's weights are used, and keep their own dtype.

        Packed weights (GPTQ, AWQ) are buffers; offloaded ones are nowhere until a hook of accelerate brings them.
        """
        for module in base_layer.modules():
            if (device := getattr(getattr(module, "_hf_hook", None), "execution_device", None)) is not None:
                return torch.device(device), None
        own = {id(p) for p in self.parameters()}
        weights = (w for w in chain(base_layer.parameters(), base_layer.buffers()) if id(w) not in own)
        device = next((weight.device for weight in weights), None)
        return (None if device is None or device.type == "meta" else device), None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        for kind in self.kinds:
            for name, tensor in getattr(self, kind).items():
                if kind in self.other_param_names or self.configs[name].by_cells:
                    tensor.requires_grad_(False)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)
        self._checked.discard(adapter_name)

    def merge(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "A Focus adapter changes which tokens attend to each other, not the weights, so it cannot be merged. "
            "Use unload() to get the base model back."
        )

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
    def pattern(self) -> Pattern:
        """Window, sinks, dense start and bands of the adapter in force."""
        return self.routing_config.pattern

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
        self.check_finite(adapter_name)
        projection, centroids = self.focus_proj[adapter_name], self.focus_centroids[adapter_name]
        scores = routing.group_scores(hidden_states, projection, centroids, self.configs[adapter_name].temperature)
        return scores, self.focus_balance[adapter_name].detach().float().clone()

    @property
    def is_observed(self) -> bool:
        """Whether somebody is told of what the layer does."""
        return self.observer is not None or bool(self.attention_observers)

    @property
    def rotary(self) -> nn.Module | None:
        """What makes the angles of the model's rotary positions, if anything."""
        return self._outside[1]

    def cell_router(self, adapter_name: str, heads: tuple[int, int] | None = None) -> CellRouter:
        """The tensors of an adapter with ``routing="cells"``, put together once; they stay the layer's own.

        Args:
            adapter_name: whose.
            heads: the first key/value head and how many; all by default.
        """
        kinds: dict[str, Any] = self._modules  # without torch's search among names, in every call
        tensors = [kinds[kind]._parameters[adapter_name] for kind in OF_CELLS.values()]
        if torch.compiler.is_compiling():
            return _cell_router(tensors, heads)
        state = adapter_name, heads, state_of(tensors)
        kept = self._cells
        if kept is None or kept[0] != state:
            self.check_finite(adapter_name)
            with torch.inference_mode(False):
                kept = self._cells = state, _cell_router(tensors, heads)
        return kept[1]

    def made_by(self, adapter_name: str) -> object:
        """What the groups of keys depend on, besides the keys: of an adapter's tensors, as they are now."""
        if torch.compiler.is_compiling():
            return None
        config, kinds = self.configs[adapter_name], self._modules
        names = ("focus_key_proj" if config.by_cells else "focus_proj", "focus_centroids", "focus_balance")
        return state_of(kinds[name]._parameters[adapter_name] for name in names)  # type: ignore[union-attr, misc]

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

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}: K={c.num_groups}, top_k={c.top_k}, window={c.local_window}" for name, c in self.configs.items()
        )


def _cell_router(tensors: list[Tensor], heads: tuple[int, int] | None) -> CellRouter:
    router = CellRouter(*(tensor.detach() for tensor in tensors))
    return router if heads is None else router.of_heads(*heads)


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
