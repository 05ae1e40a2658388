"""Before an engine starts: which adapter it serves, and whether vLLM is asked to do what works with it."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..adapter import FocusConfig
from ..adapter.control import dial_changes
from ..adapter.loading import read_weights
from ..escape import shown
from ..hub.pull import adapter_folder
from ..records.adapter_files import WEIGHTS_FILE, AdapterFileError, names_a_folder

#: Architectures whose attention modules get the hidden states that the adapter's groups are made of, compared with
#: transformers in tests.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

#: What may turn the dial, in the place of the adapter's own; see `focus_hf.set_routing`.
_DIAL = ("pairs", "threshold", "length", "top_k")

#: What may stand under ``focus`` in ``additional_config``: folder or Hub id, branch, tag or commit of it, the dial.
_OPTIONS = ("adapter", "revision", *_DIAL)


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter as it is served.

    Args:
        asked: what was asked for, by name.
        config: its configuration, with the dial as it was asked for.
        folder: where its files are.
    """

    asked: dict[str, Any]
    config: FocusConfig
    folder: Path

    @property
    def pinned(self) -> dict[str, Any]:
        """What was asked for, as an option; of an adapter on the Hub, the commit that it is at now."""
        return self.asked | ({} if names_a_folder(self.asked["adapter"]) else {"revision": self.folder.name})

    def tensors(self) -> dict[int, dict[str, Tensor]]:
        """By layer, the tensors by kind (``focus_proj``, ...).

        Raises:
            AdapterFileError: a layer is there twice, or not at all.
        """
        path = self.folder / WEIGHTS_FILE
        found: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.config.layers or []}
        for name, tensor in read_weights(str(path)).items():
            module, _, kind = name.rpartition(".")
            layer = found.get(_layer_index(module))
            if layer is None or kind in layer:
                raise AdapterFileError(f"{path} holds {shown(name)} twice, or for a layer that it does not route.")
            layer[kind] = tensor
        for number, layer in found.items():
            if layer.keys() != self.config.tensor_shapes().keys():
                raise AdapterFileError(f"{path} lacks tensors of layer {number}; download or save the adapter again.")
        return found


def read_adapter(wanted: Any) -> ServedAdapter:
    """The adapter that ``additional_config`` asks for, its files found and checked, once per process and choice.

    Args:
        wanted: what is under ``focus`` there.

    Raises:
        ValueError: one line that says what to change.
        HubError: the Hub refused or was not reached.
    """
    if not isinstance(wanted, dict) or not isinstance(wanted.get("adapter"), str):
        raise ValueError(
            "additional_config: 'focus' must be a mapping that names an adapter, such as "
            f'{{"focus": {{"adapter": "org/name"}}}}, got {shown(wanted)}.'
        )
    if foreign := sorted(str(name) for name in wanted.keys() - set(_OPTIONS)):
        raise ValueError(f"additional_config: 'focus' has no {shown(foreign[0])}, only {', '.join(_OPTIONS)}.")
    revision = wanted.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"additional_config: revision of 'focus' must be a text, got {shown(revision)}.")
    return _open(json.dumps(wanted, sort_keys=True))


@functools.cache
def _open(wanted: str) -> ServedAdapter:
    asked = {name: value for name, value in json.loads(wanted).items() if value is not None}
    folder = adapter_folder(asked["adapter"], revision=asked.get("revision"))
    config = FocusConfig.from_pretrained(str(folder))
    for name, value in dial_changes(config, *(asked.get(name) for name in _DIAL)).items():
        setattr(config, name, value)
    served = ServedAdapter(asked, config, folder)
    served.tensors()
    return served


def _layer_index(name: str) -> int:
    """The index of a layer from the name of its router: the last number in it; -1 without one."""
    numbers = re.findall(r"\.(\d{1,9})(?=\.)", name)
    return int(numbers[-1]) if numbers else -1


def prepare_arguments(arguments: Any, wanted: Any) -> ServedAdapter:
    """Check the adapter, and make an engine's arguments such that it can be served: with the adapter's commit in the
    place of a branch, so that all processes serve one, and uncompiled where a layer has to be told hidden states.

    Args:
        arguments: vLLM's ``EngineArgs``; ``enforce_eager`` and ``additional_config`` are set.
        wanted: what is under ``focus`` in ``additional_config``.

    Raises:
        ValueError: one line that says what to change.
    """
    adapter = read_adapter(wanted)
    arguments.enforce_eager = arguments.enforce_eager or not adapter.config.by_cells
    arguments.additional_config = {**arguments.additional_config, "focus": adapter.pinned}
    return adapter


def check_engine(config: Any, adapter: ServedAdapter) -> None:
    """Refuse what Focus does not do in vLLM, and a model that the adapter was not made for.

    Args:
        config: ``VllmConfig``.
        adapter: to be served.

    Raises:
        ValueError: one line that says what to change.
    """
    why = _model_mismatch(config.model_config, adapter) or _not_served(config, adapter)
    if why is not None:
        raise ValueError(f"The Focus adapter {adapter.asked['adapter']} cannot be served: {why}.")


def _model_mismatch(model: Any, adapter: ServedAdapter) -> str | None:
    """Why the adapter does not fit a model (``ModelConfig``)."""
    own, text = adapter.config, model.hf_text_config
    base = own.base_model_name_or_path or "another model"
    if getattr(model.hf_config, "is_encoder_decoder", False):
        return f"{model.model} is an encoder and a decoder; Focus routes decoders"
    if model.use_mla:
        return f"{model.model} has latent attention (MLA), which Focus does not route in vLLM"
    known = [name for name in model.architectures if name in ARCHITECTURES]
    if not known or model.runner_type != "generate":
        return (
            f"{model.model} is {', '.join(map(shown, model.architectures))}, run to {model.runner_type}; Focus is "
            f"tested in vLLM with {', '.join(ARCHITECTURES)}, run to generate"
        )
    if own.hidden_size != text.hidden_size:
        return f"it was made for {base} of width {own.hidden_size}, and {model.model} has width {text.hidden_size}"
    if missing := [layer for layer in own.layers or [] if layer >= text.num_hidden_layers]:
        return f"it routes layer {missing[0]}, and {model.model} has {text.num_hidden_layers} layers"
    heads = model.get_total_num_kv_heads()
    if own.key_value_heads is not None and own.key_value_heads != heads:
        return f"it was made for {own.key_value_heads} key/value heads, and the layers of {model.model} have {heads}"
    types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if types != {"full_attention"} or model.get_sliding_window() is not None:
        return f"{model.model} has layers with a sliding window, which Focus does not serve in vLLM"
    return None


def _not_served(config: Any, adapter: ServedAdapter) -> str | None:
    """What of an engine's configuration (``VllmConfig``) does not work."""
    parallel, cache = config.parallel_config, config.cache_config
    if config.compilation_config.mode and not adapter.config.by_cells:
        return "shared routing needs --enforce-eager (enforce_eager=True): hidden states are taken from the model"
    if config.speculative_config is not None:
        return "speculative decoding does not work with it; leave --speculative-config out"
    if cache.cache_dtype != "auto":
        return f"--kv-cache-dtype {cache.cache_dtype} does not work with it; leave it at auto"
    if config.kv_transfer_config is not None:
        return "keys that are moved or kept elsewhere lose their groups; leave --kv-transfer-config and offloading out"
    heads, parts = config.model_config.get_total_num_kv_heads(), parallel.tensor_parallel_size
    if heads % parts:
        return f"its {heads} key/value heads cannot be split over {parts} devices; lower --tensor-parallel-size"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "it needs whole sequences on a device; leave context parallelism out"
    return None
