"""What stock saving and pushing leave on a Hub is found all the same, and a push of ours makes it a whole card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download

import focus_hf
from focus_hf.hub import search
from tests.hub.test_search import found

#: By PEFT's own `push_to_hub`, by transformers' own, and a folder of PEFT's `save_pretrained`.
STOCK = """
import sys
from transformers import AutoConfig
from focus_hf import FocusConfig
from tests.families import base_model, focus_model

model = focus_model("llama")
model.get_base_model().name_or_path = "org/stock"
model.peft_config["default"].base_model_name_or_path = "org/stock"
model.save_pretrained(sys.argv[1])
model.push_to_hub("ada/by-peft")
plain = base_model("llama")
plain.add_adapter(FocusConfig(num_groups=4, top_k=1, local_window=4))
plain.push_to_hub("ada/by-transformers")
"""


@pytest.fixture(scope="module")
def stock(hub, tmp_path_factory):
    """The folder that PEFT saved; two repositories that PEFT and transformers pushed."""
    folder = tmp_path_factory.mktemp("stock")
    root = str(Path(focus_hf.__file__).parents[1])
    place = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_TOKEN": "t", "PYTHONPATH": root}
    subprocess.run(
        [sys.executable, "-c", STOCK, str(folder / "saved")], env={**os.environ, **place}, check=True, timeout=300
    )
    return folder / "saved"


def card_of(hub, name):
    return ModelCard(Path(hf_hub_download(name, "README.md", endpoint=hub.endpoint)).read_text())


def test_what_stock_saving_writes_has_the_tag(stock):
    data = ModelCard((stock / "README.md").read_text()).data
    assert "focus" in data.tags and "base_model:adapter:org/stock" in data.tags


def test_stock_pushes_are_found_with_a_tag_and_without(hub, stock):
    """transformers' `push_to_hub` writes a model's tags; PEFT's puts the empty template over its own card."""
    assert card_of(hub, "ada/by-transformers").data.tags == ["focus"]
    assert "ada/by-transformers" in found(hub)
    assert not card_of(hub, "ada/by-peft").data.tags
    assert {"ada/by-peft", "ada/by-transformers"} <= set(found(hub, author="ada"))
    assert found(hub, "org/stock", author="ada") == found(hub, text="by-peft") == ["ada/by-peft"]


def test_a_configuration_without_the_tag_is_found_where_the_search_is_narrow(hub, stock, monkeypatch):
    api = HfApi(endpoint=hub.endpoint, token="t")
    for name, file in (("eve/untagged", stock / "adapter_config.json"), ("eve/other", b'{"peft_type": "LORA"}')):
        api.create_repo(name, exist_ok=True)
        api.upload_file(path_or_fileobj=file, path_in_repo="adapter_config.json", repo_id=name)
        card = "base_model: org/untagged\nbase_model_relation: adapter\ntags: [base_model:adapter:org/untagged]\n"
        api.upload_file(path_or_fileobj=f"---\n{card}---\n".encode(), path_in_repo="README.md", repo_id=name)
    assert found(hub, "org/untagged") == found(hub, author="eve", text="untagged") == ["eve/untagged"]
    (adapter,) = search("org/untagged", endpoint=hub.endpoint)
    assert (adapter.num_groups, adapter.base_model) == (4, "org/untagged")
    assert "eve/untagged" not in found(hub)
    asked = []
    monkeypatch.setattr(sys.modules["focus_hf.hub.search"], "_is_focus", lambda model, hub: asked.append(model.id))
    monkeypatch.setattr(sys.modules["focus_hf.hub.search"], "MOST_UNTAGGED", 1)
    with pytest.warns(UserWarning, match="More than 1 repositories without the tag 'focus'"):
        assert found(hub, "org/untagged") == []
    assert len(asked) == 1


def test_our_push_of_what_peft_saved_is_a_whole_card(hub, stock):
    assert "More Information Needed" in (stock / "README.md").read_text()
    for name in ("ada/ours", "ada/by-peft"):  # a new one, and over PEFT's
        focus_hf.push_to_hub(stock, name, base_model="org/stock", license="mit", endpoint=hub.endpoint, token="t")
        card = card_of(hub, name)
        assert "More Information Needed" not in card.text and "focus_hf:begin summary" in card.text
        assert card.data.library_name == "focus_hf" and {"focus", "peft"} <= set(card.data.tags)
    assert {"ada/ours", "ada/by-peft"} <= set(found(hub, "org/stock"))
