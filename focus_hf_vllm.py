"""vLLM's plugin (entry point ``vllm.general_plugins``): serves a Focus adapter that the engine is told to serve.

vLLM calls `register` in every process. Without an adapter nothing but the two wrappers below is there, and
``focus_hf`` is not imported. What an engine serves is in its ``additional_config``, which vLLM carries to all of its
processes: ``--additional-config '{"focus": {"adapter": "org/name"}}'``.
"""

from __future__ import annotations

import difflib
import functools
from typing import Any

#: The part of ``additional_config`` that is ours.
OPTION = "focus"

#: What is there if it is not: ``null`` is a mistake.
_ABSENT = object()


def register() -> None:
    """Wrap where vLLM makes an engine's configuration, and where it has loaded a model."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if getattr(EngineArgs, "_serves_focus", False):
        return
    EngineArgs._serves_focus = True
    make_config, load_model = EngineArgs.create_engine_config, BaseModelLoader.load_model

    @functools.wraps(make_config)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted(self.additional_config)
        if wanted is _ABSENT:
            return make_config(self, *args, **kwargs)
        from focus_hf.vllm.start import check_engine, prepare_arguments

        adapter = prepare_arguments(self, wanted)
        config = make_config(self, *args, **kwargs)
        check_engine(config, adapter)
        return config

    @functools.wraps(load_model)
    def load_and_attach(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, vllm_config, model_config, *args, **kwargs)
        wanted = _wanted(vllm_config.additional_config)
        if wanted is not _ABSENT:
            from focus_hf.vllm.start import check_engine, read_adapter

            adapter = read_adapter(wanted)
            check_engine(vllm_config, adapter)
            from focus_hf.vllm.attach import attach

            attach(model, vllm_config, adapter)
        return model

    EngineArgs.create_engine_config = create_engine_config
    BaseModelLoader.load_model = load_and_attach


def _wanted(additional_config: Any) -> Any:
    """What is under `OPTION`, whatever it is; other parts belong to others, but for one that is almost ours.

    Raises:
        ValueError: a key is a misspelt `OPTION`: the model would be served without its adapter.
    """
    if not isinstance(additional_config, dict):
        return _ABSENT
    if OPTION not in additional_config:
        for key in additional_config:
            if difflib.get_close_matches(str(key)[:20].strip().lower(), [OPTION], cutoff=0.7):
                raise ValueError(
                    f"additional_config has {str(key)[:20]!r}: a Focus adapter is named under {OPTION!r}."
                )
    return additional_config.get(OPTION, _ABSENT)
