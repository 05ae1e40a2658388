"""What is done between two calls: each function does one thing to a `Session`, which then goes on."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import focus_hf
from focus_hf.adapter import focus_layers
from tests.adapter.interventions.session import Session, compare
from tests.families import token_ids


def crop(session: Session) -> None:
    """As assisted decoding takes tokens back."""
    count = session.chance.randrange(1, min(session.length, 12))
    session.valid = session.valid[:, :-count]
    session.change_caches(f"crop {count}", lambda cache: cache.crop(-count))


def reorder(session: Session) -> None:
    """As beam search goes on with some beams."""
    rows = torch.tensor([session.chance.randrange(session.batch) for _ in range(session.batch)])
    session.valid = session.valid[rows]
    session.change_caches(f"reorder {rows.tolist()}", lambda cache: cache.reorder_cache(rows))


def select(session: Session) -> None:
    """As contrastive search keeps some rows, or none of the others."""
    rows = torch.tensor([session.chance.randrange(session.batch) for _ in range(session.chance.choice([1, 2, 3]))])
    session.valid = session.valid[rows]
    session.change_caches(f"select {rows.tolist()}", lambda cache: cache.batch_select_indices(rows))


def repeat(session: Session) -> None:
    """As one prompt is continued several times."""
    times = session.chance.choice([2, 3])
    session.valid = session.valid.repeat_interleave(times, dim=0)
    session.change_caches(f"repeat {times}", lambda cache: cache.batch_repeat_interleave(times))


def beam(session: Session) -> None:
    """A prompt, several beams of it, and two steps of these."""
    repeat(session)
    for _ in range(2):
        session.call(1)
        reorder(session)


def copied(session: Session) -> None:
    """A prompt that is kept, and continued by a copy: neither sees what happens to the other."""
    session.log.append("deepcopy")
    first, kept, valid = session.past, session.kept, session.valid
    session.past, session.kept = copy.deepcopy(first), copy.deepcopy(kept)
    session.call(session.chance.choice([1, 3]))
    if session.chance.random() < 0.5:
        session.log.append("back to the original")
        session.past, session.kept, session.valid = first, kept, valid


def pickled(session: Session) -> None:
    """A prompt that is kept on disk."""
    session.log.append("pickle")
    session.past = pickle.loads(pickle.dumps(session.past))


def another_share(session: Session) -> None:
    """The dial, or a mode without groups, for some tokens or for good."""
    config = session.model.peft_config["default"]
    before = config.top_k
    if session.chance.random() < 0.3:
        session.log.append("mode local")
        focus_hf.set_routing(session.model, mode="local")
        session.call(session.chance.choice([1, 2, 9]))
        focus_hf.set_routing(session.model, mode=None)
        return
    for _ in range(session.chance.choice([1, 2])):
        if config.routing == "cells":
            changes: dict[str, Any] = {"threshold": session.chance.uniform(-9.0, -1.0)}
        elif session.chance.random() < 0.3:
            changes = {"dense_below": session.chance.choice([0, 5, 40])}
        else:
            changes = {"top_k": session.chance.randrange(1, config.num_groups + 1)}
        session.log.append(str(changes))
        focus_hf.set_routing(session.model, **changes)
        session.call(session.chance.choice([1, 2, 9]))
    if config.routing == "shared" and session.chance.random() < 0.5:
        session.log.append(f"back to {before}")
        focus_hf.set_routing(session.model, top_k=before)


def another_adapter(session: Session) -> None:
    """Two adapters take turns on one cache."""
    for name in ("other", "default", "other")[: session.chance.choice([1, 2, 3])]:
        session.log.append(f"adapter {name}")
        session.model.set_adapter(name)
        session.adapter = name
        session.call(session.chance.choice([1, 2, 9]))


def the_base_model(session: Session) -> None:
    """Some tokens without any adapter, in the middle."""
    session.log.append("base model")
    session.adapter = None
    session.call(session.chance.choice([1, 2, 9]))
    session.adapter = "default"


def another_dtype(session: Session) -> None:
    """The model and its cache become float64, and back."""
    for dtype in (torch.float64, torch.float32)[: session.chance.choice([1, 2])]:

        def cast(cache: Any, dtype: torch.dtype = dtype) -> None:
            for layer in cache.layers:
                if getattr(layer, "keys", None) is not None and layer.keys.is_floating_point():
                    layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)

        own = {id(tensor) for layer in focus_layers(session.model) for tensor in layer.parameters()}
        for model in (session.model, session.reference.model):
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in own and tensor.is_floating_point():  # the adapter's keep their own
                    tensor.data = tensor.data.to(dtype)
        session.change_caches(str(dtype), cast)
        session.call(session.chance.choice([1, 2]))


def inference_mode(session: Session) -> None:
    """Some calls under ``inference_mode``; those around it under ``no_grad``."""
    session.log.append("inference mode")
    for _ in range(session.chance.choice([1, 2])):
        session.call(session.chance.choice([1, 7]), torch.inference_mode())


def chunk(session: Session) -> None:
    """Several tokens at once, as chunked prefill and assisted decoding hand them over."""
    session.call(session.chance.choice([2, 5, 17]))


def _interrupted(session: Session, error: type[BaseException]) -> None:
    """A call that ends inside the attention of some layer; then the base model, another conversation, and on."""
    session.log.append(error.__name__)
    before, valid = session.length, session.valid
    slides = any(getattr(layer, "is_sliding", False) for layer in session.past.layers)  # these give no token back
    spare = copy.deepcopy(session.past) if slides or session.chance.random() < 0.5 else None
    router = session.chance.choice(focus_layers(session.model))
    parts = [m for m in router.get_base_layer().modules() if not list(m.children()) and list(m.parameters())]
    parts = [part for part in parts if not any(part is own for own in router.modules())]
    part = session.chance.choice([parts[0], parts[-1]])

    def fail(module: nn.Module, args: Any) -> None:
        raise error("on purpose")

    handle = part.register_forward_pre_hook(fail)
    session.valid = torch.cat([valid, torch.ones(session.batch, 1, dtype=torch.bool)], dim=1)
    try:
        session.judged(session.tokens(1))
    except error:
        pass
    else:
        raise RuntimeError("the call was to be interrupted")
    finally:
        handle.remove()
        session.valid = valid
    ids = token_ids(batch=2, length=session.chance.choice([3, 30]))
    with torch.no_grad():
        with session.model.disable_adapter():
            found = session.model(input_ids=ids).logits
        expected = session.reference(ids, type(session.kept).empty(session.reference.model), None, None, None)
    compare(found, expected, ", ".join([*session.log, "base model"]))
    session.fresh(session.chance.choice([3, 30]))
    if spare is not None:
        session.past = spare
    else:
        for layer in session.past.layers:  # some have the token, others do not
            if (extra := layer.get_seq_length() - before) > 0:
                layer.crop(-extra)


def an_exception(session: Session) -> None:
    _interrupted(session, MemoryError)


def control_c(session: Session) -> None:
    _interrupted(session, KeyboardInterrupt)


def another_thread(session: Session) -> None:
    """Another thread has a conversation with the same model meanwhile, in turns with this one."""
    session.log.append("another thread")
    failed: list[BaseException] = []

    def talk() -> None:
        try:
            session.fresh(session.chance.choice([3, 30]))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


INTERVENTIONS: dict[str, Callable[[Session], None]] = {
    "crop": crop,
    "reorder": reorder,
    "select": select,
    "repeat": repeat,
    "deepcopy": copied,
    "pickle": pickled,
    "share": another_share,
    "adapter": another_adapter,
    "base model": the_base_model,
    "dtype": another_dtype,
    "inference mode": inference_mode,
    "chunk": chunk,
    "beam": beam,
    "exception": an_exception,
    "Ctrl-C": control_c,
    "thread": another_thread,
}
