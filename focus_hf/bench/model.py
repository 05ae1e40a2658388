"""A whole model: prefill and decoding with the adapter on, against the same model with it off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..adapter import FocusConfig, focus_layers, set_routing
from ..adapter.layer import FocusLayer
from ..evaluate.checks import check_positions
from ..evaluate.modes import adapters_off, device_of
from ..hub import load_adapted
from ..placement import load_base
from ..texts import TextSource, tokenize_windows
from ..train import calibrate
from .settings import Measurement, Setting
from .timing import interleaved

#: Layers of the small Llama that is measured where no model is given.
LAYERS = 4

#: Tokens of a prompt that is not measured, before those that are; tokens decoded in a turn; turns.
_WARM_UP, _IN_A_TURN, _TURNS = 512, 8, 7
_NEW_TOKENS = _IN_A_TURN * _TURNS

#: A way of dense attention that transformers has not, for single tokens.
_FASTER = "dense, cache in place, heads folded"


@torch.no_grad()
def bench_model(
    setting: Setting,
    base: str | None = None,
    adapter: str | None = None,
    device_map: str | None = None,
    text: Path | None = None,
) -> list[Measurement]:
    """Prefill of one prompt (logits of its last token), and decoding after it, a token at a time.

    The base model and the adapter take turns, of several tokens each.

    Args:
        setting: the heads give the size of the small Llama, unless ``base`` is given.
        base: a causal language model, a folder or a Hub id.
        adapter: a Focus adapter, a folder or a Hub id; without one the centroids are random.
        device_map: how accelerate spreads a model that is given, in the place of the setting's device.
        text: whose first tokens are the prompt; random ones without.

    Returns:
        One measurement for prefill (``"prefill"``) and one per decoded token (``"generate"``). A token of the base
        model is measured as it is, and as fast as we can make it (`_FASTER`): with a cache that grows in place, as
        with Focus, and heads folded. The faster is what is compared with, and the other is in ``extra``.
    """
    model = load_or_make(setting, base, adapter, device_map)
    layers = focus_layers(model)
    ids = _token_ids(model, setting, text, setting.length + _NEW_TOKENS).to(device_of(model))
    caches: dict[str, DynamicCache] = {}
    off = partial(adapters_off, layers)
    attention: dict[str, Callable[[], AbstractContextManager[None]]] = {"dense": off, "focus": nullcontext}

    def prefill(which: str, length: int = setting.length) -> None:
        caches[which] = DynamicCache(config=model.config)
        with attention[which]():
            model(input_ids=ids[:, :length], past_key_values=caches[which], use_cache=True, logits_to_keep=1)

    def decode(which: str) -> None:
        with attention[which]():
            for _ in range(_IN_A_TURN):
                step = caches[which].get_seq_length()
                model(input_ids=ids[:, step : step + 1], past_key_values=caches[which], use_cache=True)

    def times(call: Callable[[str], None], least: int, most: int) -> dict[str, float]:
        turns = {which: partial(call, which) for which in attention}
        return interleaved(turns, setting.device, seconds=5, least=least, most=most, warm_up=False)

    for which in attention:  # compile, allocate
        prefill(which, min(setting.length, _WARM_UP))
    name = adapter or base or "small Llama"
    found = {"prefill": times(prefill, 2, 9)}
    with suppress(torch.OutOfMemoryError):  # a third cache
        caches[_FASTER] = copy.deepcopy(caches["focus"])
        attention[_FASTER] = partial(_heads_folded, layers)
    found["generate"] = {which: ms / _IN_A_TURN for which, ms in times(decode, _TURNS, _TURNS).items()}
    return [_measurement(kind, setting, name, ms.pop("focus"), ms) for kind, ms in found.items()]


@contextmanager
def _heads_folded(layers: list[FocusLayer]) -> Iterator[None]:
    """The base model, a single token's query heads as queries of their key head, of which PyTorch's kernel for a CPU
    makes several times less work in bfloat16."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if query.shape[2] > 1 or mask is not None:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        folded = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
        output = scaled_dot_product_attention(folded, key, value, scale=kwargs.get("scaling"))
        return output.flatten(1, 2)[:, None], None

    with adapters_off(layers), sdpa_by(attend):
        yield


@contextmanager
def sdpa_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Within the block, transformers' SDPA attention is this function."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def _measurement(kind: str, setting: Setting, name: str, focus: float, dense: dict[str, float]) -> Measurement:
    """Beside the fastest of several ways of dense attention, in milliseconds."""
    best = min(dense, key=dense.__getitem__)
    others = {f"{way} (ms)": round(value, 2) for way, value in dense.items() if way != best}
    return Measurement(kind, setting, dense[best], focus, baseline=f"{name}, {best}", extra=others)


def _token_ids(model: Any, setting: Setting, text: Path | None, length: int) -> Tensor:
    """int64 ``(1, length)``: of a text, or random."""
    if text is None:
        generator = torch.Generator().manual_seed(setting.seed)
        return torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    documents = TextSource((str(text),)).load().documents
    return tokenize_windows(tokenizer, "".join(documents), length)[:1]


def load_or_make(setting: Setting, base: str | None, adapter: str | None, device_map: str | None = None) -> Any:
    """The model with this adapter, or one with random centroids; see `bench_model`."""
    if adapter is None:
        return make_model(setting, base, device_map)
    model, _, _ = load_adapted(adapter, base=base, device=setting.device, device_map=device_map, dtype=setting.dtype)
    check_positions(model, [setting.length + _NEW_TOKENS])
    if setting.top_k != focus_layers(model)[0].routing_config.top_k:  # else heads keep theirs
        set_routing(model, top_k=setting.top_k)
    if setting.pairs is not None:
        set_routing(model, pairs=setting.pairs, length=setting.length)
    return model


def make_model(setting: Setting, base: str | None = None, device_map: str | None = None) -> Any:
    """A model with random centroids, calibrated so that its groups are balanced on random tokens."""
    torch.manual_seed(setting.seed)
    if base is None:
        hidden = setting.heads * setting.head_dim
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096,
                hidden_size=hidden,
                intermediate_size=hidden * 8 // 3 // 64 * 64,
                num_hidden_layers=LAYERS,
                num_attention_heads=setting.heads,
                num_key_value_heads=setting.kv_heads,
                max_position_embeddings=max(setting.length + 1024, 2048),
            )
        )
        model.to(setting.device, setting.torch_dtype)
    else:
        model = load_base(base, device=setting.device, device_map=device_map, dtype=setting.dtype)
    config = FocusConfig(
        num_groups=setting.num_groups,
        top_k=setting.top_k,
        local_window=setting.local_window,
        sink_tokens=setting.sink_tokens,
        task_type="CAUSAL_LM",
    )
    routed = get_peft_model(model, config).eval()
    calibrate(routed, [torch.randint(0, model.config.vocab_size, (4, 1024))])
    return routed
