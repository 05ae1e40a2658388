"""What must hold of a routed model, whatever its architecture: each check says what is wrong, or nothing."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import DynamicCache

import focus_hf
from focus_hf.adapter import FocusLayer, observe_routing

from .oracle import allowed, eager_with
from .tiny import VOCABULARY

WINDOW, SINKS, GROUPS, LENGTH = 8, 2, 4, 40

#: Greatest difference of logits (whose spread is made 1) that rounding explains.
TOLERANCE = 2e-4


def config(**changes: Any) -> focus_hf.FocusConfig:
    return focus_hf.FocusConfig(
        num_groups=GROUPS, local_window=WINDOW, sink_tokens=SINKS, task_type="CAUSAL_LM", **changes
    )


def routed(base: Any, **changes: Any) -> Any:
    """The model with a random adapter whose groups are uneven enough to matter."""
    torch.manual_seed(1)
    model = get_peft_model(base, config(**changes)).eval()
    for layer in layers(model):
        layer.focus_balance["default"].data.normal_(std=0.5 if layer.configs["default"].by_cells else 2.0)
    return model


def layers(model: Any) -> list[FocusLayer]:
    return [module for module in model.modules() if isinstance(module, FocusLayer)]


def tokens(length: int = LENGTH, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 9, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **{"use_cache": False, **kwargs}).logits


def differ(found: Tensor, expected: Tensor) -> str | None:
    """How far two results are apart, in spreads of the expected one; nothing if rounding explains it."""
    if found.shape != expected.shape:
        return f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    if not found.isfinite().all():
        return "not finite"
    distance = float((found - expected).abs().max() / expected.std())
    return None if distance < TOLERANCE else f"differs by {distance:.2g}"


# -- checks: of (base, model) --------------------------------------------------------------------------------------


def changes(base: Any, model: Any) -> str | None:
    return None if differ(logits(model, tokens()), logits(base, tokens())) else "the adapter changes nothing"


def short(base: Any, model: Any) -> str | None:
    ids = tokens(WINDOW + 1)
    return None if torch.equal(logits(model, ids), logits(base, ids)) else "short contexts are not the base model's"


def disabled(base: Any, model: Any) -> str | None:
    with model.disable_adapter():
        return None if torch.equal(logits(model, tokens()), logits(base, tokens())) else "switched off, it differs"


def causal(base: Any, model: Any) -> str | None:
    ids, other = tokens(), tokens()
    other[:, 30:] = tokens(seed=5)[:, 30:]
    if differ(logits(base, ids)[:, :30], logits(base, other)[:, :30]):
        return None  # nor is the base model
    return differ(logits(model, ids)[:, :30], logits(model, other)[:, :30])


def definition(base: Any, model: Any) -> str | None:
    """Against the base model's own eager attention under an explicit mask."""
    found: dict[Any, list[Tensor]] = {layer.get_base_layer(): [] for layer in layers(model)}
    ids = tokens()
    with observe_routing(model, lambda layer, scores, members: found[layer.get_base_layer()].append(members)):
        result = logits(model, ids, use_cache=False)
    if silent := sum(not calls for calls in found.values()):
        return f"{silent} of {len(found)} routed layers decide nothing"
    inner = model.get_base_model()
    before = inner.config._attn_implementation
    pairs = {module: [allowed(members, WINDOW, SINKS) for members in calls] for module, calls in found.items()}
    try:
        inner.set_attn_implementation("eager")
        with model.disable_adapter(), eager_with(pairs) as asked:
            expected = logits(model, ids, use_cache=False)
    finally:
        inner.set_attn_implementation(before)
    if len({id(used) for used in asked}) != sum(len(calls) for calls in pairs.values()):
        return "the oracle saw other calls of eager attention"
    return differ(result, expected)


def reference(base: Any, model: Any) -> str | None:
    """Every path against masked attention."""
    ids, result = tokens(), []
    for path in ("masked", "native", "grouped", "auto"):
        focus_hf.set_routing(model, path=path)
        try:
            result.append(logits(model, ids))
        except ValueError as error:
            if "cannot" not in str(error):
                raise
    focus_hf.set_routing(model, path="auto")
    return next((wrong for other in result[1:] if (wrong := differ(other, result[0]))), None)


def one_group(base: Any, model: Any) -> str | None:
    """With all tokens in one group every pair is attended."""
    before = [layer.focus_balance["default"].data.clone() for layer in layers(model)]
    for layer in layers(model):
        layer.focus_balance["default"].data.copy_(torch.tensor([1e4] + [0.0] * (GROUPS - 1)))
    found = logits(model, tokens())
    for layer, balance in zip(layers(model), before, strict=True):
        layer.focus_balance["default"].data.copy_(balance)
    return differ(found, logits(base, tokens()))


def _decoded(model: Any, ids: Tensor, start: int, cache: Any) -> Tensor:
    """Logits of a prefill and of tokens one by one."""
    kwargs = {} if cache is None else {"past_key_values": cache}
    with torch.no_grad():
        out = model(input_ids=ids[:, :start], use_cache=True, **kwargs)
        every = [out.logits]
        for index in range(start, ids.shape[1]):
            out = model(input_ids=ids[:, index : index + 1], past_key_values=out.past_key_values, use_cache=True)
            every.append(out.logits)
    return torch.cat(every, dim=1)


def decode(base: Any, model: Any) -> str | None:
    """Through the model's own cache and through a plain one, from a short and from a long prefill."""
    ids = tokens()
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("its own cache", lambda: None),
        ("a DynamicCache", DynamicCache),
        ("a DynamicCache for it", lambda: DynamicCache(config=base.config)),
    ]
    expected, dense = logits(model, ids), logits(base, ids)
    for name, make in makers:
        for start in (5, 25):
            try:
                if differ(_decoded(base, ids, start, make()), dense):
                    continue  # nor does the base model
            except Exception:
                continue
            try:
                found = _decoded(model, ids, start, make())
            except ValueError as refusal:
                if "cannot continue it" in str(refusal):
                    continue  # said in one line
                raise
            if wrong := differ(found, expected):
                return f"decoding through {name} {wrong}"
    return None


def generate(base: Any, model: Any) -> str | None:
    ids = tokens(20)
    plan = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def says(any_model: Any) -> Tensor:
        expected = ids
        for _ in range(12):
            expected = torch.cat([expected, logits(any_model, expected)[:, -1:].argmax(-1)], dim=1)
        return expected

    try:
        if not torch.equal(base.generate(ids, **plan), says(base)):
            return None  # nor does the base model (BART is forced to end)
    except Exception:
        return None
    return None if torch.equal(model.generate(input_ids=ids, **plan), says(model)) else "generates other tokens"


def last_logits(base: Any, model: Any) -> str | None:
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return None
    return differ(logits(model, tokens(), logits_to_keep=1), logits(model, tokens())[:, -1:])


def left_padding(base: Any, model: Any) -> str | None:
    ids = tokens(30, batch=1)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(37) >= 7).long()[None]
    kwargs: dict[str, Any] = {"attention_mask": mask}
    if "position_ids" in inspect.signature(base.forward).parameters:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    try:
        if differ(logits(base, padded, **kwargs)[:, 7:], logits(base, ids)):
            return None  # nor is the base model the same
    except Exception:
        return None
    return differ(logits(model, padded, **kwargs)[:, 7:], logits(model, ids))


def save_and_load(base: Any, model: Any, another: Callable[[Any], Any] = copy.deepcopy) -> str | None:
    """``another`` makes another base model, for those that cannot be copied."""
    expected = logits(model, tokens())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        one, two = another(base), another(base)
        one.load_adapter(folder)
        for name, again in (("load_adapter", one), ("PeftModel", PeftModel.from_pretrained(two, folder))):
            if not torch.equal(logits(again.eval(), tokens()), expected):
                return f"loaded by {name} it differs"
    return None


def gradients(base: Any, model: Any) -> str | None:
    """The last check: training changes balance potentials."""
    model.train()
    said = model(input_ids=tokens(), use_cache=False).logits
    torch.nn.functional.cross_entropy(said.flatten(0, 1), tokens().flatten()).backward()
    for layer in layers(model):
        for gradient in (layer.focus_proj["default"].grad, layer.focus_centroids["default"].grad):
            if gradient is None or not gradient.isfinite().all() or not gradient.abs().sum() > 0:
                return f"no gradient in {layer.name}"
    return None


CHECKS: dict[str, Callable[[Any, Any], str | None]] = {
    function.__name__: function
    for function in (
        changes,
        short,
        disabled,
        causal,
        definition,
        reference,
        one_group,
        decode,
        generate,
        last_logits,
        left_padding,
        save_and_load,
        gradients,
    )
}
