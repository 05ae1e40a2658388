"""Names of a model's modules and tensors, without what a head, PEFT or another wrapper adds to them."""

from __future__ import annotations

from typing import Any

#: What wrappers of a model put into the names of what is in it.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def base_prefix(model: Any) -> str:
    """What stands before the names in a model that has a head, and not in the same model without one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    prefix = getattr(base, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def plain_name(name: str, prefix: str) -> str:
    """A name without what differs between models of one kind: wrappers, PEFT's prefix, the `base_prefix`."""
    return unwrapped(name).removeprefix("base_model.model.").removeprefix(prefix)


def unwrapped(name: str) -> str:
    """A name without what wrappers of a model add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
