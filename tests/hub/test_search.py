"""Finding adapters, and looking at one without its weights, over real HTTP."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys

import pytest
from huggingface_hub import HfApi

import focus_hf
from focus_hf.adapter.save import save_adapter
from focus_hf.hub import HubError, search
from focus_hf.hub.pull import adapter_info
from focus_hf.local_hub import LocalHub
from focus_hf.records import Evaluation, Results, save_results
from focus_hf.records.group_report import GroupFacts, GroupReport, LayerFacts
from tests.families import focus_model, httpx


def report(label):
    """A report in which one group of the second layer is about something."""

    def facts(number, about):
        return GroupFacts(0.25, about or "mixed", top=[{"token": "a", "count": 1}])

    layers = [
        LayerFacts(f"layer{n}", [facts(g, label if (n, g) == (1, 2) else None) for g in range(4)], 0.1)
        for n in range(3)
    ]
    return GroupReport(4, 1, {"name": "t", "tokens": 10, "window": 5}, layers)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Three adapters of two base models, and repositories that are none."""
    folder = tmp_path_factory.mktemp("search")
    adapter = save_adapter(focus_model("llama"), folder / "adapter")
    with LocalHub(folder / "hub", token="t") as running:
        api = HfApi(endpoint=running.endpoint, token="t")
        for name, base, perplexity, label in (
            ("ada/law-focus", "org/llama", 10.2, "punctuation"),
            ("bob/med-focus", "org/llama", 10.1, "verbs"),
            ("bob/other", "org/qwen", None, None),
        ):
            (adapter / "focus_groups.json").unlink(missing_ok=True)
            (adapter / "focus_results.json").unlink(missing_ok=True)
            if perplexity is not None:
                rows = [
                    {"mode": "dense", "top_k": None, "perplexity": 10.0, "pairs": 1.0},
                    {"mode": "hard", "top_k": 1, "perplexity": perplexity, "pairs": 0.3},
                ]
                data = Evaluation("text", 48, rows, dataset=f"org/{name[4:7]}-texts")
                save_results(Results([data], largest_group=0.26, measured_with={"torch": "2"}), adapter)
                report(label).to_json(adapter / "focus_groups.json")
            focus_hf.push_to_hub(
                adapter, name, base_model=base, license="mit", endpoint=running.endpoint, token="t",
                metadata={"tags": ["legal"]} if name.startswith("ada") else None,
            )  # fmt: skip
        api.create_repo("eve/lora")
        api.upload_file(
            path_or_fileobj=b"---\ntags: [peft]\nbase_model: org/llama\nbase_model_relation: adapter\n---\n",
            path_in_repo="README.md",
            repo_id="eve/lora",
        )
        api.create_repo("eve/fake")  # says that it is one
        api.upload_file(
            path_or_fileobj=b"---\ntags: [focus]\nfocus: [1]\ndatasets: 3\n---\n",
            path_in_repo="README.md",
            repo_id="eve/fake",
        )
        yield running


def found(hub, *arguments, **options):
    return [adapter.repo_id for adapter in search(*arguments, endpoint=hub.endpoint, token="t", **options)]


def test_by_base_model_tag_author_name_and_settings(hub):
    assert set(found(hub)) == {"ada/law-focus", "bob/med-focus", "bob/other", "eve/fake"}
    assert set(found(hub, "org/llama")) == {"ada/law-focus", "bob/med-focus"}
    assert found(hub, tags=["legal"]) == ["ada/law-focus"]
    assert set(found(hub, author="bob")) == {"bob/med-focus", "bob/other"}
    assert found(hub, text="law") == ["ada/law-focus"]
    assert set(found(hub, num_groups=4, top_k=1)) == {"ada/law-focus", "bob/med-focus", "bob/other"}
    assert found(hub, num_groups=8) == found(hub, "org/none") == []


def test_by_what_groups_mean(hub):
    assert found(hub, group="punctuation") == ["ada/law-focus"]
    assert found(hub, group="verbs") == ["bob/med-focus"]
    (adapter,) = search(group="verb", endpoint=hub.endpoint)
    assert adapter.groups == ["verbs (layer 1, group 2)"]
    assert found(hub, group="noun") == []


def test_orders(hub):
    assert found(hub, "org/llama", sort="perplexity") == ["bob/med-focus", "ada/law-focus"]
    assert found(hub, sort="perplexity")[:2] == ["bob/med-focus", "ada/law-focus"]  # the unmeasured come last
    for name in ("bob/med-focus", "ada/law-focus"):
        more = 1 + max(adapter.downloads for adapter in search(endpoint=hub.endpoint))
        for _ in range(more):
            httpx.get(f"{hub.endpoint}/{name}/resolve/main/adapter_config.json").raise_for_status()
        assert found(hub, "org/llama")[0] == found(hub)[0] == name  # downloaded most
    assert len(found(hub, sort="date", limit=2)) == 2
    with pytest.raises(ValueError, match="sort must be one of downloads, likes, date, perplexity, got 'stars'"):
        found(hub, sort="stars")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        found(hub, limit=0)


def test_what_is_found(hub):
    (adapter,) = search("org/llama", author="ada", endpoint=hub.endpoint)
    assert (adapter.num_groups, adapter.top_k, adapter.local_window, adapter.license) == (4, 1, 8, "mit")
    assert adapter.perplexity_change == pytest.approx(2.0) and adapter.groups == ["punctuation"]
    assert adapter.datasets == ["org/law-texts"] and len(adapter.commit) == 40
    assert json.loads(json.dumps(adapter.to_dict()))["repo_id"] == "ada/law-focus"


def test_no_hub_is_one_line():
    with pytest.raises(HubError, match="http://127.0.0.1:9 cannot be reached"):
        search(endpoint="http://127.0.0.1:9")


def test_info_reads_no_weights(hub, monkeypatch):
    seen = []
    download = HfApi.hf_hub_download
    monkeypatch.setattr(HfApi, "hf_hub_download", lambda self, *a, **k: (seen.append(a), download(self, *a, **k))[1])
    facts = adapter_info("ada/law-focus", endpoint=hub.endpoint)
    assert not any("safetensors" in str(call) for call in seen)
    assert facts["base_model"] == "org/llama" and facts["parameters"] == 1728 and facts["layers"] == 3
    assert facts["quality"] == [{"data": "text", "context_length": 48, "dense": 10.0, "focus": 10.2}]
    assert len(facts["commit"]) == 40 and facts["license"] == "mit" and facts["bytes"] > 6000
    folder = focus_hf.pull("ada/law-focus", endpoint=hub.endpoint)
    local = adapter_info(folder)
    assert local["bytes"] == facts["bytes"] and len(local["weights_sha256"]) == 64


def run(hub, tmp_path, *arguments, columns="200"):
    """The command as people have it: its script, which enters the package without torch."""
    import os
    from pathlib import Path

    script = Path(sys.executable).with_name("hf-focus")
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "COLUMNS": columns}
    return subprocess.run([script, *arguments], capture_output=True, text=True, env=environment)


def test_names_are_whole_in_a_narrow_terminal(hub, tmp_path):
    name = "ada/a-name-that-is-as-long-as-names-of-adapters-on-the-hub-can-be-and-goes-beyond-a-line"
    api = HfApi(endpoint=hub.endpoint, token="t")
    api.create_repo(name)
    card = f'---\ntags: [focus]\nbase_model: org/{"long-" * 15}base\nfocus: {{groups: ["NOUN\\e[31m"]}}\n---\n'
    api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=name)
    try:
        shown = run(hub, tmp_path, "search", columns="80").stdout
        assert name in shown.splitlines() and "ada/law-focus" in shown.splitlines()
        assert f"  base org/{'long-' * 15}base" in shown.splitlines()
        assert "  loses with 30 % of the pairs, 48 tokens: text +2.0 %" in shown.splitlines()
        assert "\x1b" not in shown and "NOUN" in shown
        shown = run(hub, tmp_path, "info", "ada/law-focus", columns="40").stdout
        commit = api.model_info("ada/law-focus").sha
        assert commit in re.sub(r"\s", "", shown) and "…" not in shown
    finally:
        api.delete_repo(name)


def test_search_and_info_on_the_command_line(hub, tmp_path):
    shown = run(hub, tmp_path, "search", "--base", "org/llama", "--sort", "perplexity")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.index("bob/med-focus") < shown.stdout.index("ada/law-focus") and "text +2.0 %" in shown.stdout
    rows = json.loads(run(hub, tmp_path, "search", "--group", "punctuation", "--json").stdout)
    assert [row["repo_id"] for row in rows] == ["ada/law-focus"]
    assert "No Focus adapter matches" in run(hub, tmp_path, "search", "--base", "org/none").stdout
    shown = run(hub, tmp_path, "info", "ada/law-focus")
    assert "perplexity 10.00 to 10.20 (+2.00 %)" in shown.stdout, shown.stderr
    missing = run(hub, tmp_path, "info", "ada/none")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1 and "does not exist" in missing.stderr


def test_what_needs_no_torch_does_not_import_it(hub, tmp_path):
    """Searching, pulling, looking and making a card start quickly, and work where torch is not installed."""
    code = """
import sys, runpy
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
import focus_hf_command
focus_hf_command.main()
"""
    import os

    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
    folder = tmp_path / "pulled"
    for arguments in (
        ["search"],
        ["info", "ada/law-focus"],
        ["pull", "ada/law-focus", str(folder)],
        ["info", str(folder)],
        ["card", "--adapter", str(folder), "--repo-id", "me/x", "--write"],
        ["push", str(folder), "me/x", "--dry-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
    assert "# me/x" in (folder / "README.md").read_text()


def test_as_an_extension_of_hf(hub, tmp_path):
    """Installed as `hf extensions install` leaves it, for the real `hf` command line."""
    import os
    from pathlib import Path

    from huggingface_hub.cli.extensions import ExtensionManifest

    script = Path(sys.executable).with_name("hf-focus")
    ExtensionManifest(
        owner="org",
        repo="hf-focus",
        repo_id="org/hf-focus",
        short_name="focus",
        executable_path=str(script),
        type="python",
        installed_at=datetime.datetime.now(datetime.UTC),
    ).save(tmp_path / ".local/share/hf/extensions/hf-focus")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }
    hf = Path(sys.executable).with_name("hf")
    done = subprocess.run(
        [hf, "focus", "search", "--author", "ada", "--json"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert [row["repo_id"] for row in json.loads(done.stdout)] == ["ada/law-focus"]
    failed = subprocess.run([hf, "focus", "info", "ada/none"], capture_output=True, text=True, env=environment)
    assert failed.returncode == 1 and "does not exist" in failed.stderr


def test_the_line_that_helps_to_choose():
    """Base, size, loss by kind of text: as this package writes them into a card, and whatever else stands there."""
    from focus_hf.cli.find import _described
    from focus_hf.hub.remote import Hub
    from focus_hf.hub.search import _read, read_model

    focus = {"num_groups": 64, "local_window": 32, "routing": "cells", "parameters": 640_000, "pairs": 0.2482}
    focus |= {"context_length": 2048, "losses": {"novel.txt": 2.0, "plays.txt": -0.52}}
    said = {"id": "org/x", "cardData": {"base_model": "org/base", "focus": focus}}
    adapter = _read(read_model(said), Hub())
    base, losses, _ = _described(adapter)
    assert base == "base org/base, K=64, 640,000 parameters"
    assert losses == "loses with 25 % of the pairs, 2,048 tokens: novel +2.0 %, plays -0.5 %"
    for odd in (7, [7], {7: 1.0}, {"novel": "much"}, {"novel": float("nan")}, {"novel": {}}):
        focus["losses"] = odd
        adapter = _read(read_model(said), Hub())
        assert adapter.losses == {} and len(list(_described(adapter))) == 2
