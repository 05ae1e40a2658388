"""How Focus layers get into a model and out of it: PEFT's tuner."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from peft.config import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import Tensor, nn

from ..commits import is_commit
from ..escape import one_line, shown
from ..records.adapter_files import HUB_TAG, ROUTER, AdapterFileError
from .config import FocusConfig
from .discovery import head_shape, input_width, layer_numbers
from .hooks import add_router, refuse_mixed_batch, remove_router
from .layer import FocusLayer
from .loading import awaits_weights, guard, remove_guard, take_out, tensors_for
from .rotation import find_rotary
from .targets import find_targets, without_patterns


class FocusModel(BaseTuner):
    """Adds centroids to the attention layers of a frozen model (arXiv 2604.03260).

    Args:
        model: a transformers model whose attention goes through the `AttentionInterface`.
        config: a `FocusConfig`.
        adapter_name: name of the adapter.

    Raises:
        ValueError: the model has no causal self-attention that Focus can route, or is not the one that the adapter
            was made for.
    """

    prefix = "focus_"
    tuner_layer_cls = FocusLayer
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict) -> PeftConfig:
        return peft_config  # targets are found, not looked up by model type

    def _check_tied_modules(self, model: nn.Module, peft_config: PeftConfig) -> None:
        """Focus never targets embeddings, so PEFT need not match target_modules against their names."""

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Choose the attention modules and check that they are the ones the adapter was made for."""
        peft_config.validate()
        _refuse_lost_weights(model)
        targets = find_targets(model, peft_config)
        without_patterns(peft_config, model, targets)
        self._found = copy.copy(peft_config)  # what to match is not saved: it is found anew on every model
        self._found.target_modules = list(targets)
        self._numbers = layer_numbers(model)
        layers = sorted(self._numbers[name] for name in targets)
        name = getattr(model, "name_or_path", "") or type(model).__name__
        facts: dict[str, Any] = {"hidden_size": input_width(next(iter(targets.values()))), "layers": layers}
        if peft_config.by_cells:
            facts |= head_shape(list(targets.values()))
        for field, found in facts.items():
            expected = getattr(peft_config, field)
            if expected is not None and expected != found:
                base = peft_config.base_model_name_or_path
                raise ValueError(
                    f"This adapter does not fit {one_line(name, 80)}: its {field} is {shown(expected)}, the model's "
                    f"is {shown(found)}." + (f" It was made for {one_line(base, 80)}." if base else "")
                )
            setattr(peft_config, field, found)
        _warn_if_other_base(peft_config, model)
        guard(self.model)
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(HUB_TAG)  # PEFT and transformers write a model's tags into their cards

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: PeftConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What PEFT asks for the names under which it writes a file's tensors into a model, see `tensors_for`.

        An adapter that was added for a file that may not be loaded is taken out again.
        """
        try:
            return tensors_for(model, adapter_name, state_dict)
        except AdapterFileError:
            if awaits_weights(model, adapter_name):
                take_out(model, adapter_name)
            raise

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """PEFT enters this around every call, with the call's arguments."""
        refuse_mixed_batch(kwargs.get("adapter_names"), self.active_adapters)
        yield

    def _check_target_module_exists(self, peft_config: PeftConfig, key: str) -> Any:  # type: ignore[override]
        return check_target_module_exists(self._found, key)

    def _create_and_replace(  # type: ignore[override]
        self, peft_config: Any, adapter_name: str, target: nn.Module, *_: Any, current_key: str, **__: Any
    ) -> None:
        router = getattr(target, ROUTER, None)
        if router is None:
            rotary = find_rotary(self.model, target)
            router = FocusLayer(target, current_key, self._numbers[current_key], rotary)
            router.train(target.training)
            router._active_adapter = adapter_name
            add_router(router)
        router.update_layer(adapter_name, peft_config)

    def _unload_and_optionally_merge(self, merge: bool = True, *_: Any, **__: Any) -> Any:
        for router in [module for module in self.model.modules() if isinstance(module, FocusLayer)]:
            if merge:
                router.merge()
            remove_router(router)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        if HUB_TAG in (getattr(self.model, "model_tags", None) or ()):
            self.model.model_tags.remove(HUB_TAG)
        remove_guard(self.model)
        return self.model


def _refuse_lost_weights(model: Any) -> None:
    """Refuse a model from which `PeftModel.from_pretrained` has taken the hooks that bring its weights from disk."""
    on_disk = "disk" in (getattr(model, "hf_device_map", None) or {}).values()
    if on_disk and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "PeftModel.from_pretrained cannot put an adapter on a model with parts on disk. Load the model anew, and "
            "the adapter with model.load_adapter(...)."
        )


def _warn_if_other_base(config: FocusConfig, model: nn.Module) -> None:
    """Warn when a base model from the Hub cannot be the commit that the adapter was trained on.

    A loaded model does not carry its commit, so this looks into the cache: if only another commit of the model is
    there, that is what was loaded. Models from folders or other caches are not judged.
    """
    name, pinned = getattr(model, "name_or_path", ""), config.revision
    if not name or os.path.isdir(name) or pinned is None or not is_commit(pinned):
        return
    try:
        current = try_to_load_from_cache(name, "config.json")
        wanted = try_to_load_from_cache(name, "config.json", revision=pinned)
    except HFValidationError:
        return
    if name == config.base_model_name_or_path and isinstance(current, str) and not isinstance(wanted, str):
        warnings.warn(
            f"This adapter was trained on {name} at commit {pinned[:12]}, but the copy here is at commit "
            f"{Path(current).parent.name[:12]}: its groups may not fit. Load the base model with revision={pinned!r}.",
            stacklevel=2,
        )
