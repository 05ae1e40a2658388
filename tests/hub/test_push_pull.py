"""Push, pull and cards against the local Hub, with the real client over real HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub import HfApi
from peft import PeftModel
from safetensors.torch import load_file, save_file

import focus_hf
from focus_hf.hub import HubError
from focus_hf.hub.remote import Hub
from focus_hf.local_hub import LocalHub
from focus_hf.records import AdapterFileError, check_adapter, save_results
from tests.families import BY_DEFAULT, base_model, focus_model, logits, token_ids
from tests.hub.test_search import report
from tests.records.figures import RESULTS

IDS = token_ids()


def push(hub, source, name, **kwargs):
    return focus_hf.push_to_hub(source, name, base_model="demo/base", endpoint=hub.endpoint, token="t", **kwargs)


@pytest.mark.parametrize("family", BY_DEFAULT)
def test_round_trip_through_the_hub_changes_nothing(hub, family, tmp_path):
    model, name = focus_model(family), f"demo/round-trip-{family}"
    info = push(hub, model, name)
    assert len(info.oid) == 40
    folder = str(focus_hf.pull(name, tmp_path / "pulled", endpoint=hub.endpoint))
    plain = base_model(family)
    plain.load_adapter(folder)
    for loaded in (plain, PeftModel.from_pretrained(base_model(family), folder)):
        assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert not list(tmp_path.glob(".pulled*"))


def test_one_commit_with_the_adapters_files_only(hub, adapter, name):
    (adapter / "notes.txt").write_text("private")
    (adapter / "figures").mkdir()
    (adapter / "figures" / "quality.png").write_bytes(b"\x89PNG")
    save_results(RESULTS, adapter)
    push(hub, adapter, name)
    api = HfApi(endpoint=hub.endpoint)
    assert set(api.list_repo_files(name)) == {
        ".gitattributes",
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "figures/quality.png",
        "focus_results.json",
    }
    assert len(list(api.list_repo_commits(name))) == 2


def test_pushing_the_same_again_makes_no_commit(hub, adapter, name):
    push(hub, adapter, name)
    before = HfApi(endpoint=hub.endpoint).model_info(name).sha
    push(hub, adapter, name)
    assert HfApi(endpoint=hub.endpoint).model_info(name).sha == before


def test_dry_run_sends_nothing(hub, adapter, name):
    plan = push(hub, adapter, name, dry_run=True)
    assert list(plan.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert plan.files["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").stat().st_size
    assert plan.card_changes == "" and "states no licence" in plan.notes[0]
    assert not HfApi(endpoint=hub.endpoint).repo_exists(name)


def test_pull_request_and_private(hub, adapter, name):
    push(hub, adapter, name, private=True)
    api = HfApi(endpoint=hub.endpoint, token="t")
    assert api.model_info(name).private
    save_results(RESULTS, adapter)
    info = push(hub, adapter, name, create_pr=True)
    assert info.pr_num == 1
    assert "focus_results.json" in api.list_repo_files(name, revision="refs/pr/1")
    assert "focus_results.json" not in api.list_repo_files(name)


def test_paths_of_this_machine_do_not_leave_it(hub, adapter, name, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    replace(report("NOUN"), base_model=str(tmp_path)).to_json(adapter / "focus_groups.json")
    with pytest.raises(ValueError, match='base model is a folder on this machine.*base_model="org/name"'):
        focus_hf.push_to_hub(adapter, name, endpoint=hub.endpoint, token="secret-token")
    push(hub, adapter, name)
    pulled = focus_hf.pull(name, endpoint=hub.endpoint)
    for file in ("README.md", "adapter_config.json", "focus_groups.json"):
        text = (pulled / file).read_text()
        assert str(tmp_path) not in text and "secret-token" not in text
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path)


def change_weights(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def cut_short(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def first(tensors):
    return sorted(tensors)[0]


DAMAGE = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json does not exist"),
    "config not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "other adapter": (
        lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "peft_type 'LORA', not 'FOCUS'",
    ),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors does not exist"),
    "cut short": (cut_short, "damaged or cut short"),
    "pickle": (lambda f: (f / "adapter_model.bin").write_bytes(b"x"), "adapter_model.bin, a pickle"),
    "NaN": (lambda f: change_weights(f, lambda t: t[first(t)].fill_(float("nan"))), "NaN or infinity"),
    "missing tensor": (
        lambda f: change_weights(f, lambda t: t.pop(first(t))),
        "lacks .*focus_balance; it is incomplete",
    ),
    "foreign tensor": (
        lambda f: change_weights(f, lambda t: t.update({first(t).replace("focus_balance", "weight"): torch.ones(1)})),
        "which is not part of a Focus adapter",
    ),
    "wrong shape": (
        lambda f: change_weights(f, lambda t: t.update({first(t): torch.ones(9)})),
        r"has shape \(9,\), but adapter_config.json asks for \(4,\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_adapters_are_neither_pushed_nor_accepted(hub, adapter, damage):
    break_it, message = DAMAGE[damage]
    break_it(adapter)
    with pytest.raises(AdapterFileError, match=message):
        check_adapter(adapter)
    name = f"demo/damaged-{damage.replace(' ', '-').lower()}"
    with pytest.raises(AdapterFileError, match=message):
        push(hub, adapter, name)
    api = HfApi(endpoint=hub.endpoint, token="t")
    assert not api.repo_exists(name)

    api.create_repo(name)  # somebody else pushed it all the same
    api.upload_folder(folder_path=adapter, repo_id=name)
    with pytest.raises(AdapterFileError):
        focus_hf.pull(name, endpoint=hub.endpoint)


def test_shapes_are_checked_before_the_weights_are_downloaded(hub, adapter, tmp_path, monkeypatch):
    change_weights(adapter, lambda tensors: tensors.update({first(tensors): torch.ones(9)}))
    api = HfApi(endpoint=hub.endpoint, token="t")
    api.create_repo("demo/wrong-shape")
    api.upload_folder(folder_path=adapter, repo_id="demo/wrong-shape")

    read = []
    fetch = Hub.fetch
    monkeypatch.setattr(Hub, "fetch", lambda *args, **options: read.append(args[2]) or fetch(*args, **options))
    with pytest.raises(AdapterFileError, match=r"has shape \(9,\)"):
        focus_hf.pull("demo/wrong-shape", endpoint=hub.endpoint)
    assert read == ["adapter_config.json"]


def test_errors_of_the_hub_are_one_line_that_says_what_to_do(hub, adapter, tmp_path):
    with pytest.raises(HubError, match="demo/nothing does not exist.*hf auth login"):
        focus_hf.pull("demo/nothing", endpoint=hub.endpoint)
    with pytest.raises(HubError, match="http://127.0.0.1:9 cannot be reached"):
        focus_hf.pull("demo/nothing", endpoint="http://127.0.0.1:9")
    push(hub, adapter, "demo/errors")
    with pytest.raises(HubError, match="no such revision"):
        focus_hf.pull("demo/errors", revision="v9", endpoint=hub.endpoint)
    with (
        LocalHub(tmp_path / "closed", users={"good": "ada"}) as closed,
        pytest.raises(HubError, match="hf auth login"),
    ):
        focus_hf.push_to_hub(adapter, "ada/x", base_model="demo/base", endpoint=closed.endpoint, token="bad")
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty"):
        focus_hf.pull("demo/errors", occupied, endpoint=hub.endpoint)
    assert [path.name for path in occupied.iterdir()] == ["file"]


def test_links_in_the_place_of_the_folder(hub, adapter, name, tmp_path):
    push(hub, adapter, name)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        FileExistsError, match=r"dangling is a link to .*nowhere, which does not exist: remove"
    ) as error:
        focus_hf.pull(name, tmp_path / "dangling", endpoint=hub.endpoint)
    assert "\n" not in str(error.value) and (tmp_path / "dangling").is_symlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert focus_hf.pull(name, tmp_path / "link", endpoint=hub.endpoint) == tmp_path / "link"
    assert (tmp_path / "empty" / "adapter_config.json").is_file() and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} >= {"dangling", "empty", "link"}


@pytest.mark.parametrize("bad", ["no-namespace/", "/abs/path", "./here", "a b/c", ""])
def test_names_that_the_hub_cannot_have(adapter, bad):
    with pytest.raises(ValueError, match="repo_id="):
        focus_hf.push_to_hub(adapter, bad, base_model="demo/base")


STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel, get_peft_model
import focus_hf
sys.path.insert(0, {root!r})
from tests.hub.test_search import report
from tests.records.figures import RESULTS
from tests.families import FAMILIES, base_model, focus_model, focus_config, logits, token_ids, unbalance

base_model("llama").push_to_hub("demo/stock-base", token="t")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("demo/stock-base"), focus_config())
unbalance(model)
expected = logits(model.eval(), token_ids())
model.push_to_hub("demo/stock-peft", token="t")

plain = AutoModelForCausalLM.from_pretrained("demo/stock-base")
plain.load_adapter("demo/stock-peft")
assert torch.equal(logits(plain, token_ids()), expected)
plain.push_to_hub("demo/stock-transformers", token="t")

focus_hf.push_to_hub(model, "demo/stock-ours", token="t")
for name in ("demo/stock-peft", "demo/stock-transformers", "demo/stock-ours"):
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(name), token_ids()), expected), name
    again = AutoModelForCausalLM.from_pretrained("demo/stock-base")
    again.load_adapter(name)
    assert torch.equal(logits(again, token_ids()), expected), name
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("demo/stock-base"), name)
    assert torch.equal(logits(wrapped, token_ids()), expected), name
"""


def test_stock_push_to_hub_and_loading_by_name(hub, tmp_path):
    """What users type, in a process of its own that knows the Hub by HF_ENDPOINT."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "PYTHONPATH": root}
    code = STOCK.format(root=root)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
