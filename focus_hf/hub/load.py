"""Load an adapter with the base model that it names."""

from __future__ import annotations

from typing import Any

from ..records.adapter_files import read_config
from .pull import adapter_folder


def load_adapted(
    adapter: str,
    *,
    base: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
) -> Any:
    """Load a base model with a Focus adapter, and its tokenizer.

    Args:
        adapter: folder or Hub id.
        base: folder or Hub id of the base model; the adapter's own by default.
        device: where to.
        device_map: in its place, how accelerate spreads the model: ``"auto"``, ... or a device; see `check_placement`.
        dtype: of the base model's weights, the checkpoint's own by default.
        revision: of the adapter on the Hub.

    Returns:
        The model in eval mode, the tokenizer, the adapter's folder.

    Raises:
        ValueError: the adapter is damaged, its base model is not to be found, or there is no such device or dtype.
        ModuleNotFoundError: ``device_map`` needs accelerate.
        HubError: the Hub refused or was not reached.
    """
    from transformers import AutoTokenizer

    from ..adapter.placement import check_placement, load_base

    check_placement(device, device_map, dtype)
    folder = adapter_folder(adapter, revision=revision)
    config = read_config(folder)
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"{adapter} does not name its base model; name it with --model.")
    pinned = config.revision if base is None else None
    tokenizer_pinned = config.tokenizer_revision if base is None else None
    try:
        model = load_base(name, device=device, device_map=device_map, dtype=dtype, revision=pinned)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=tokenizer_pinned or pinned)
    except OSError as error:
        if pinned is not None:
            raise ValueError(
                f"{adapter} was trained on {name} at commit {pinned[:12]}, which cannot be loaded "
                f"({str(error).splitlines()[0]}). To use another version of it, name the model with --model {name}."
            ) from None
        raise ValueError(
            f"The base model {name} of {adapter} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    model.load_adapter(str(folder))
    return model.eval(), tokenizer, folder
