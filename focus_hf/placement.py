"""Where a base model goes, and in which dtype: what every command that loads one asks for."""

from __future__ import annotations

from typing import Any

import torch

from .machine import check_device, require

#: Ways of accelerate to spread a model over the devices of a machine.
SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")

#: Dtypes of weights; "auto" is the checkpoint's own.
DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_placement(device: str = "cpu", device_map: str | None = None, dtype: str = "auto") -> None:
    """Make sure that a model can be placed as asked, before anything is loaded.

    Args:
        device: for all of it.
        device_map: one of `SPREADS`, or a device, in the place of ``device``; what spreads a model is accelerate.
        dtype: one of `DTYPES`.

    Raises:
        ValueError: there is no such device, spread or dtype.
        ModuleNotFoundError: accelerate is missing.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if device_map is None:
        check_device(device)
        return
    if device_map not in SPREADS:
        try:
            torch.device(device_map)
        except RuntimeError:
            raise ValueError(
                f"device_map must be one of {', '.join(SPREADS)}, or a device, as cpu or cuda:0; got {device_map!r}."
            ) from None
        check_device(device_map)
    require("accelerate")


def load_base(
    name: str, *, device: str = "cpu", device_map: str | None = None, dtype: str = "auto", **kwargs: Any
) -> Any:
    """Load a causal language model, from a folder or by its Hub id, to where it should be; what `check_placement`
    raises, and `OSError` where there is no such model."""
    from transformers import AutoModelForCausalLM

    check_placement(device, device_map, dtype)
    model = AutoModelForCausalLM.from_pretrained(name, device_map=device_map, dtype=dtype, **kwargs)
    return model if device_map is not None or device == "cpu" else model.to(device)  # type: ignore[arg-type]
