"""vLLM's plugin around a stand-in for vLLM: an adapter that is asked for wrongly is never left out without a word."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

import focus_hf
import focus_hf_vllm
from focus_hf.adapter.save import save_adapter
from focus_hf.vllm.start import read_adapter
from tests.families import focus_model
from tests.vllm.test_start import engine

pytestmark = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM itself is here: tests/vllm/test_engine.py")


@pytest.fixture
def arguments(monkeypatch):
    """vLLM's ``EngineArgs``, with the plugin around it: its configuration is that of `tests.vllm.test_start`."""

    class EngineArgs:
        enforce_eager = False

        def __init__(self, additional_config: Any) -> None:
            self.additional_config = additional_config

        def create_engine_config(self) -> Any:
            config = engine()
            config.additional_config = self.additional_config
            return config

    class BaseModelLoader:
        def load_model(self, vllm_config: Any, model_config: Any) -> Any:
            return "dense"

    made = {"engine.arg_utils": {"EngineArgs": EngineArgs}}
    made["model_executor.model_loader.base_loader"] = {"BaseModelLoader": BaseModelLoader}
    for path, names in made.items():
        parts = ["vllm", *path.split(".")]
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        vars(sys.modules[name]).update(names)
    focus_hf_vllm.register()
    EngineArgs.loader = BaseModelLoader
    return EngineArgs


@pytest.mark.parametrize(
    "wrong",
    [
        {"focus": None},
        {"focus": {}},
        {"focus": "org/name"},
        {"focus": {"adaptor": "org/name"}},
        *[{key: {"adapter": "org/name"}} for key in ("Focus", "fokus", "focus_hf", "focuss", "focus ", "FOCUS")],
    ],
    ids=repr,
)
def test_a_wrong_option_is_refused_where_the_engine_starts_and_where_it_loads(wrong, arguments):
    for starts in (
        lambda: arguments(wrong).create_engine_config(),
        lambda: arguments.loader().load_model(type("Config", (), {"additional_config": wrong}), None),
    ):
        with pytest.raises(ValueError, match="focus") as error:
            starts()
        assert str(error.value).isprintable() and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "others", [None, {}, {"torchair_graph_config": {}}, {"locus_of_control": 1}, "nothing"], ids=repr
)
def test_options_of_others_are_theirs(others, arguments):
    assert arguments(others).create_engine_config().additional_config is others
    assert arguments.loader().load_model(type("Config", (), {"additional_config": others}), None) == "dense"


def test_a_branch_is_resolved_once(hub, api, arguments, tmp_path, monkeypatch):
    """Somebody pushes while workers start: they serve what was there when the engine started."""
    repository = "demo/served"
    for number in range(2):
        folder = save_adapter(focus_model("llama", seed=number), tmp_path / str(number))
        focus_hf.push_to_hub(folder, repository, endpoint=hub.endpoint, token="t", base_model="demo/base")
        if number == 0:
            first = api.model_info(repository).sha
            monkeypatch.setattr("focus_hf.vllm.start.adapter_folder", _from(hub))
            wanted = {"adapter": repository, "revision": "main"}
            config = arguments({"focus": wanted, "other": 1}).create_engine_config()
    assert api.model_info(repository).sha != first
    assert config.additional_config == {"focus": {"adapter": repository, "revision": first}, "other": 1}
    assert read_adapter(config.additional_config["focus"]).folder.name == first


def _from(hub: Any) -> Any:
    return lambda adapter, revision: focus_hf.pull(adapter, revision=revision, endpoint=hub.endpoint, token="t")
