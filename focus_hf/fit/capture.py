"""What attention layers see of text: queries, keys, values, and gradients by their output.

Everything is taken where the attention interface passes it, whatever the architecture. One backward pass through each
window gives the gradient of `sum_t log p(y_t)`, with every `y_t` drawn from the model's own prediction, by the output
of all layers at once. Tensors wait in half precision in a folder, a file for each layer and window: `read`, `write`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from ..adapter.interface import focus_attention_forward
from ..adapter.masks import added_to_scores
from ..evaluate.modes import device_of
from .importance import LayerWindow

_CAPTURE = "focus_capture"

#: Largest number that is written, of float16's 65,504.
_LARGEST = 32768.0

#: Follows a tensor's name in that of the number by which it is multiplied when it is read.
_FACTOR = ".factor"

#: Rows of logits that are looked at in float32 at once.
_ROWS = 256


def sampled_positions(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Positions spread over a window, one at random in each of ``count`` equal stretches: int64, ascending."""
    if count >= length:
        return torch.arange(length)
    places = (torch.arange(count) + torch.rand(count, generator=generator)) * (length / count)
    return places.long().clamp(max=length - 1).unique()


def capture(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    windows: Mapping[int, Tensor],
    folder: Path,
    *,
    rows: int,
    seed: int,
    checkpointing: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run the model over windows and write what its layers see.

    Args:
        model: a causal language model.
        layers: attention modules by layer index.
        windows: token ids ``(T,)`` of any length, by the number under which they are written.
        folder: to write into, see `read`.
        rows: queries to keep of each window.
        seed: of the sampled targets and queries.
        checkpointing: compute a layer's activations again in the backward pass instead of keeping them.
        tick: called after each window.
    """
    AttentionInterface.register(_CAPTURE, _capture_attention)
    with _frozen(model, checkpointing):
        for number, window in windows.items():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            positions = sampled_positions(len(window), rows, generator)
            with _Recorder(layers, positions, partial(write, folder, number)):
                logits = model(input_ids=window[None].to(device_of(model)), use_cache=False).logits
                logits.backward(_slope_of_sampled_targets(logits.detach()[0], generator)[None])
            del logits
            tick()


@torch.no_grad()
def _slope_of_sampled_targets(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient by the logits ``(T, V)`` of the log-probability of targets drawn from them, in their place: of a long
    window they are the largest thing in memory. (Were they needed to go backward, autograd would say so.)"""
    for some in logits.split(_ROWS):
        shares = torch.softmax(some.float(), dim=-1)
        targets = torch.multinomial(shares.cpu(), 1, generator=generator).to(shares.device)
        some.copy_(shares.neg_().scatter_add_(1, targets, torch.ones_like(targets, dtype=shares.dtype)))
    return logits


class _Recorder:
    """Hooks on attention modules for the length of one forward and backward pass."""

    def __init__(self, layers: Mapping[int, nn.Module], positions: Tensor, write: Callable[[int, dict], None]) -> None:
        self._layers, self._positions, self._write = layers, positions, write
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._seen: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> _Recorder:
        for attention in self._layers.values():
            self._handles += [
                attention.register_forward_pre_hook(self._before, with_kwargs=True),
                attention.register_forward_hook(_restore_config, always_call=True),
            ]
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None and (missing := sorted(set(self._layers) - (self._seen - self._kept.keys()))):
            raise RuntimeError(f"Layer {missing[0]} was not captured: no gradient reached its attention.")

    def _before(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        layer = attention.layer_idx
        if layer not in self._seen:  # with checkpointing, the forward pass runs a second time
            self._kept[layer] = {}
            turned = _without_rotation(kwargs)
            if turned is not None:
                attention.config = _CaptureConfig(attention.config, self._take_plain_keys)
                try:
                    with torch.no_grad():
                        attention.forward(*args, **turned)
                finally:
                    _restore_config(attention)
        attention.config = _CaptureConfig(attention.config, self._attend)

    def _take_plain_keys(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
    ) -> Tensor:
        self._kept[module.layer_idx]["plain_keys"] = key[0].detach()
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Dense attention, and what it was computed from is kept."""
        biases = (kwargs.get("position_bias"), kwargs.get("sinks"), added_to_scores(attention_mask))
        if any(bias is not None for bias in biases):
            raise ValueError(
                f"{type(module).__name__} adds a bias to its scores, which fit does not take into account. Use "
                "focus-hf train."
            )
        scale, layer = query.shape[-1] ** -0.5 if scaling is None else scaling, module.layer_idx
        output, _ = focus_attention_forward(
            module, query, key, value, attention_mask, scale, 0.0, softcap, s_aux, **kwargs
        )
        if not output.requires_grad:
            output.requires_grad_()
        if layer in self._seen:
            return output
        self._seen.add(layer)
        kept = self._kept[layer]
        kept |= {"keys": key[0].detach(), "values": value[0].detach(), "queries": self._rows(query[0].detach())}
        kept.setdefault("plain_keys", kept["keys"].clone())
        kept |= {"scale": torch.tensor(scale), "softcap": torch.tensor(softcap or 0.0)}
        if s_aux is not None:
            kept["sink_logits"] = s_aux.detach().float()
        output.register_hook(partial(self._take_gradient, layer))  # which does not hold the call's tensors
        return output

    def _take_gradient(self, layer: int, gradient: Tensor) -> None:
        kept = self._kept.pop(layer)
        kept["gradients"] = self._rows(gradient[0].transpose(0, 1))
        self._write(layer, {**kept, "positions": self._positions})

    def _rows(self, values: Tensor) -> Tensor:
        return values[:, self._positions.to(values.device)]


def _restore_config(attention: Any, *_: object) -> None:
    if isinstance(attention.config, _CaptureConfig):
        attention.config = attention.config.original


class _CaptureConfig:
    """An attention module's own config for the length of one call, naming our function and what answers it."""

    _attn_implementation = _CAPTURE

    def __init__(self, config: Any, attend: Callable[..., Tensor]) -> None:
        self.original, self.attend = config, attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _capture_attention(module: Any, *tensors: Any, **named: Any) -> tuple[Tensor, None]:
    """The attention function that is registered."""
    return module.config.attend(module, *tensors, **named), None


def _without_rotation(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of an attention module with all tokens at position 0; ``None`` if rotary positions do not come as
    an argument: keys are then taken as they are.
    """
    positions = kwargs.get("position_embeddings")
    if not isinstance(positions, tuple | list) or len(positions) != 2:
        return None
    return {**kwargs, "position_embeddings": (torch.ones_like(positions[0]), torch.zeros_like(positions[1]))}


@contextmanager
def _frozen(model: nn.Module, checkpointing: bool) -> Iterator[None]:
    """In eval mode, without gradients by weights.

    With gradient checkpointing the layers are told that they train, nothing inside them.
    """
    was_training, learning = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval().requires_grad_(False)
    layers: list[Any] = [m for m in model.modules() if checkpointing and isinstance(m, GradientCheckpointingLayer)]
    before = [layer.gradient_checkpointing for layer in layers]
    for layer in layers:
        layer.training = layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, was_on in zip(layers, before, strict=True):
            layer.gradient_checkpointing = was_on
        for parameter in learning:
            parameter.requires_grad_(True)
        model.train(was_training)


def read(folder: Path, window: int, layer: int) -> LayerWindow:
    """Read what was written of a layer, by its index, and of a window, by its number."""
    with safe_open(_path(folder, window, layer), framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    factors = {name.removesuffix(_FACTOR): stored.pop(name) for name in list(stored) if name.endswith(_FACTOR)}
    scale, softcap = float(stored.pop("scale")), float(stored.pop("softcap"))
    tensors = {name: tensor.float() * factors[name] if name in factors else tensor for name, tensor in stored.items()}
    return LayerWindow(**tensors, scale=scale, softcap=softcap or None)


def write(folder: Path, window: int, layer: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the fields of a `LayerWindow`: matrices in float16, each times what lets its largest number fit.

    A softcap of 0 stands for none.

    Raises:
        OSError: there is no room for them.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            stored[name] = tensor.cpu()
            continue
        factor = tensor.abs().max().float().clamp(min=1e-30) / _LARGEST
        stored[name] = (tensor.float() / factor).half().cpu().contiguous()
        stored[name + _FACTOR] = factor.cpu()
    try:
        save_file(stored, _path(folder, window, layer))
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write to {folder} ({error}): free some space, or name another scratch_dir.") from error


def _path(folder: Path, window: int, layer: int) -> Path:
    return folder / f"{window}-{layer}.safetensors"
