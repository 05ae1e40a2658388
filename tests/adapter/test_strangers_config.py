"""What a stranger's configuration may hold: every value is checked before anything is made of it, on every way in."""

from __future__ import annotations

import json
import resource
import time

import pytest
from peft import get_peft_model

import focus_hf
from focus_hf.adapter import focus_layers
from focus_hf.records import AdapterFileError, read_config
from tests.adapter.strangers import Attempt, base_hash, edit_config, save_base_and_adapter
from tests.families import base_model, focus_config

BAD = [
    *[("num_groups", v) for v in (0, -1, 50_000_000, 10**300, 2.0, True, "8", None, [8], {"a": 1}, float("nan"))],
    ("top_k", 9),
    *[("group_dim", v) for v in (50_000_000, "16", None)],
    *[("local_window", v) for v in (-1, 10**30, 0.5, None)],
    *[("sink_tokens", v) for v in (10**30, -4, "4")],
    ("dense_below", 2**40),
    *[("temperature", v) for v in (1e300, float("inf"), float("nan"), -1, 0, 10**400, "0.1", None, [0.1], True)],
    *[("sharpness", v) for v in (0, float("inf"), None)],
    *[("gate_strength", v) for v in (-1, float("nan"), 10**400)],
    *[("sinkhorn_iterations", v) for v in (0, 10**9)],
    *[("gate", v) for v in ("sigmoid", None, ["hard"], {}, 3)],
    *[("hidden_size", v) for v in ([32], 0, 2**40, "32", 32.0)],
    *[("layers", v) for v in (5, "0,1,2", {"0": 1}, [0, 1, "2"], [0, 1, 2.0], [-1], [10**30], [[0]], [0] * 5000)],
    *[
        ("target_modules", v)
        for v in (1, [1], ["a", None], {"a": 1}, "a" * 501, ["a" * 501], "((a{9}){9})", "(?R)", "a{999}")
    ],
    *[("target_modules", v) for v in ("(([a-z_0-9]+)+\\.?)+!", "[", "(" * 400 + ")" * 400, "x\nx", ["self\x1b[31m"])],
    *[("exclude_modules", v) for v in (1, True, [["a"]], "(?P<x>a)(?P>x)", "*")],
    *[("include_sliding_layers", v) for v in (1, "yes", None)],
    ("straight_through", "no"),
    *[("format_version", v) for v in (0, "1", 10**30, None, 1.0)],
    *[("tokenizer_revision", v) for v in (7, "a" * 300, ["main"])],
    *[("revision", v) for v in (7, "a\nb", {})],
    *[("base_model_name_or_path", v) for v in (7, [], "a" * 5000, "base\x00", "a\nb")],
    *[("task_type", v) for v in (7, [], "NONSENSE", "x" * 10_000)],
    ("peft_version", {"a": 1}),
    *[("auto_mapping", v) for v in (7, [], {"a": {"b": 1}}, {str(i): "x" for i in range(99)})],
    ("inference_mode", "yes"),
]
#: What only the stock loaders look at, or look at first, and not by our rules.
STOCK = [("task_type", "NONSENSE")]


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return save_base_and_adapter(tmp_path_factory.mktemp("origin"))


@pytest.fixture
def folders(origin, tmp_path):
    (tmp_path / "adapter").mkdir()
    for file in origin[1].iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    return origin[0], tmp_path / "adapter"


def identify(value):
    return repr(value)[:40]


@pytest.mark.parametrize(("field", "value"), BAD, ids=identify)
@pytest.mark.parametrize("loader", ["load_adapter", "PeftModel"])
def test_a_value_that_cannot_be(field, value, loader, folders):
    edit_config(folders[1], **{field: value})
    before, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempt = Attempt(loader, *folders)
    assert attempt.model is None and attempt.is_one_line, repr(attempt.error)
    message = str(attempt.error)
    assert len(message) < 700 and (message.isprintable() or "NONSENSE" in message)
    assert "adapter_config.json" in message or field in ("target_modules", "exclude_modules")
    assert field in message or (field, value) in STOCK
    if attempt.base is not None:
        assert not focus_layers_of(attempt.base)
    assert time.monotonic() - before < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # KiB


def focus_layers_of(model):
    return [name for name, _ in model.named_modules() if "group_router" in name]


@pytest.mark.parametrize(("field", "value"), [case for case in BAD if case not in STOCK], ids=identify)
def test_a_value_that_cannot_be_without_torch(field, value, folders):
    """What `pull`, `info`, `search`, `verify`, `card` and `push` read."""
    if isinstance(value, str) and (value.startswith("(([a-z") or value in ("[", "*") or value.startswith("(" * 9)):
        pytest.skip("a pattern is tried out on a model's names only")
    edit_config(folders[1], **{field: value})
    with pytest.raises(AdapterFileError, match="adapter_config.json") as caught:
        read_config(folders[1])
    assert field in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "", "nul", "\x00", "[1]", "1", '"FOCUS"', "{}", "{"]
)
def test_a_file_that_is_no_configuration(text, folders):
    (folders[1] / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterFileError, match="adapter_config.json") as caught:
        read_config(folders[1])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_unknown_fields_are_for_later_versions(folders):
    nested = {}
    for _ in range(50):
        nested = {"a": [nested]}
    edit_config(folders[1], fields_of_tomorrow=nested)
    assert Attempt("load_adapter", *folders).error is None
    assert read_config(folders[1]).num_groups == 4


def test_a_pattern_that_takes_too_long(folders):
    edit_config(folders[1], target_modules="(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1m\\2o\\3")
    before = time.monotonic()
    with pytest.raises(ValueError, match="target_modules: the pattern.*takes longer than 1 s"):
        focus_hf.adapter.targets.matches(
            "target_modules",
            "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1m\\2o\\3",
            [f"model.layers.{index}.self_attn" for index in range(80)],
        )
    assert time.monotonic() - before < 5


@pytest.mark.parametrize(
    ("target", "exclude", "layers"),
    [
        (r".*\.self_attn", None, [0, 1, 2]),
        (r"model\.layers\.[02]\.self_attn", None, [0, 2]),
        (r".*layers\.\d{1,2}\.(self_attn|cross)", r".*\.1\..*", [0, 2]),
        (r"(?!.*\.0\.).*self_attn", None, [1, 2]),
        (None, r".*\.(0|2)\.self_attn", [1]),
        (["self_attn"], r".*\.2\.self_attn", [0, 1]),
    ],
)
def test_patterns_choose_layers_and_are_saved_as_names(target, exclude, layers, tmp_path):
    model = get_peft_model(base_model("llama"), focus_config(target_modules=target, exclude_modules=exclude))
    assert [layer.get_base_layer().layer_idx for layer in focus_layers(model)] == layers
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == [f"layers.{index}.self_attn" for index in layers]
    loaded, headless = base_model("llama"), base_model("llama").model
    for again in (loaded, headless):
        again.load_adapter(str(tmp_path))
        assert [layer.get_base_layer().layer_idx for layer in focus_layers(again)] == layers
    assert base_hash(loaded) == base_hash(base_model("llama"))
