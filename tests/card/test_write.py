"""The card in an adapter's folder: made from its records, made again, and never over somebody's words."""

from __future__ import annotations

import json

import pytest

from focus_hf.card import write_card
from focus_hf.records import AdapterFileError, save_results
from tests.records.figures import RESULTS


def test_a_card_is_made_and_made_again(adapter):
    path = write_card(adapter, base_model="org/base")
    assert path == adapter / "README.md" and "base_model: org/base" in path.read_text()
    assert "# your-name/adapter" in path.read_text() and "Quality: every" not in path.read_text()
    path.write_text(path.read_text() + "\nMy own words.\n")
    save_results(RESULTS, adapter)
    assert write_card(adapter, base_model="org/base") == path
    assert "Quality: every" in path.read_text() and "My own words." in path.read_text()


def test_under_a_persons_card_ours_follows(adapter):
    (adapter / "README.md").write_text("My own words.")
    assert write_card(adapter, base_model="org/base") == adapter / "README.md"
    written = (adapter / "README.md").read_text()
    assert written.index("My own words.\n\n<!-- focus_hf:begin summary") and "base_model: org/base" in written
    write_card(adapter, base_model="org/base")
    assert (adapter / "README.md").read_text() == written


def test_without_a_name_on_the_hub_there_is_none_yet(adapter, tmp_path):
    assert write_card(adapter, base_model=str(tmp_path)) is None
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert write_card(adapter) is None and not (adapter / "README.md").exists()
    config["base_model_name_or_path"] = "org/its-own"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert "base_model: org/its-own" in write_card(adapter).read_text()


def test_a_damaged_adapter_has_none(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFileError, match="adapter_model.safetensors does not exist"):
        write_card(adapter, base_model="org/base")
