"""The machine and the software: what every measured number belongs to."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl

from .attention import KERNELS, find_kernel, native
from .attention.kernels import triton_missing

#: Packages whose versions matter.
PACKAGES = (
    "focus-hf",
    "torch",
    "transformers",
    "peft",
    "huggingface_hub",
    "safetensors",
    "accelerate",
    "datasets",
    "flash-attn-3",
    "flash-attn-4",
)

#: Newer flash attention that PyTorch's own can be made of: its name there, its package, how to get it.
_NEWER_FLASH = {
    "FlashAttention 3": ("FA3", "flash-attn-3", "not on the package index: built from its repository"),
    "FlashAttention 4": ("FA4", "flash-attn-4", "pip install 'focus-hf[flash4]'"),
}


def environment() -> dict[str, Any]:
    """Versions, devices, and the attention backends found, with the one chosen for each device."""
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": _processor(), "threads": torch.get_num_threads()}]
    devices += [
        {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index)}
        for index in range(torch.cuda.device_count())
    ]
    for device in devices:
        dtype = torch.float32 if device["device"] == "cpu" else torch.bfloat16
        tensor = torch.empty(1, 64, dtype=dtype, device=device["device"])
        device["kernel"] = find_kernel(tensor, tensor).name
    return {
        "date": datetime.date.today().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "devices": devices,
        "kernels": {kernel.name: kernel.missing() or "available" for kernel in KERNELS}
        | {"native": native.missing() or "prompts and single tokens on a CPU"}
        | {"triton": triton_missing() or "prompts and single tokens on CUDA"},
        "torch_flash": {name: _newer_flash(*which) for name, which in _NEWER_FLASH.items()},
    }


def summary(facts: dict[str, Any]) -> str:
    """One line that goes under a table."""
    devices = ", ".join(f"{device['name']}{_threads(device)}" for device in facts["devices"])
    return f"{devices}; torch {facts['packages']['torch']}; {facts['date']}"


def _threads(device: dict[str, Any]) -> str:
    if "threads" not in device:
        return ""
    return f" ({device['threads']} thread{'' if device['threads'] == 1 else 's'})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _newer_flash(implementation: str, package: str, how: str) -> str:
    """Whether PyTorch's flash attention is, or could be, made of a newer one."""
    if current_flash_attention_impl() == implementation:
        return "in use as torch-flash"
    version = _version(package)
    if version is None:
        return f"{package} is not installed ({how})"
    return f'{package} {version}: torch.nn.attention.activate_flash_attention_impl("{implementation}") turns it on'


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or f"{os.cpu_count()} cores"


def measured_with() -> dict[str, str]:
    """What a measured number belongs to, for a card: versions, devices, date."""
    facts = environment()
    shown = ("focus-hf", "torch", "transformers", "peft")
    versions = {name: facts["packages"][name] for name in shown if name in facts["packages"]}
    *_, device = facts["devices"]
    count = torch.cuda.device_count()
    several = f" x {count}" if count > 1 else ""
    return {**versions, "on": f"{device['name']}{_threads(device) or several}", "date": facts["date"]}


def check_device(device: str) -> None:
    """Make sure that a device can be used.

    Raises:
        ValueError: there is no such device on this machine.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # PyTorch asserts where CUDA is missing
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from None


def require(*packages: str) -> None:
    """Make sure that packages are installed, before work that needs them in the end.

    Raises:
        ModuleNotFoundError: the first that is missing.
    """
    for package in packages:
        importlib.import_module(package)
