"""Pushing to a repository that others use too: their words, their pushes, their files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download

import focus_hf
from focus_hf.adapter.save import save_adapter
from focus_hf.hub import HubError, PushPlan
from focus_hf.local_hub import LocalHub, uploads
from focus_hf.local_hub.http import HubAnswer, answer
from focus_hf.records import save_results
from focus_hf.verify.claims import HOLDS
from focus_hf.verify.files import check_files
from tests.families import base_model, focus_model
from tests.hub.test_push_pull import change_weights
from tests.hub.test_search import report
from tests.records.figures import RESULTS


def push(hub, source, name, **options):
    options = {"base_model": "demo/base", "license": "mit", **options}
    return focus_hf.push_to_hub(source, name, endpoint=hub.endpoint, token="t", **options)


def card_of(hub, name, revision=None):
    return Path(hf_hub_download(name, "README.md", endpoint=hub.endpoint, revision=revision)).read_text()


def write_card(api, name, text):
    api.upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=name)


def test_words_on_the_hub_stay_and_the_difference_is_shown(hub, api, adapter, name):
    push(hub, adapter, name)
    write_card(api, name, card_of(hub, name) + "\nThanks to everybody.\n")
    save_results(RESULTS, adapter)
    plan = push(hub, adapter, name, dry_run=True)
    assert (
        isinstance(plan, PushPlan)
        and "\n+<!-- focus_hf:begin quality" in plan.card_changes
        and "-Thanks" not in plan.card_changes
    )
    push(hub, adapter, name)
    assert "Thanks to everybody." in card_of(hub, name) and "focus_hf:begin quality" in card_of(hub, name)
    assert list(push(hub, adapter, name, dry_run=True).files) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "focus_results.json",
    ]


def test_links_follow_the_hub_that_is_pushed_to(hub, adapter, name, tmp_path):
    """Also when the card was made for another; and its text holds wherever it is verified. A Hub on the machine on
    which a card is made holds no base models: the public one is linked."""
    made = focus_hf.FocusModelCard.from_adapter(
        adapter, repo_id=name, base_model="demo/base", endpoint="https://hub.example.org"
    )
    assert "[demo/base](https://hub.example.org/demo/base)" in str(made)
    (adapter / "README.md").write_text(str(made))
    push(hub, adapter, name)
    assert "[demo/base](https://huggingface.co/demo/base)" in card_of(hub, name)
    assert "hub.example.org" not in card_of(hub, name)
    here = focus_hf.pull(name, tmp_path / "here", endpoint=hub.endpoint)
    claims = check_files(here)
    assert {c.what: c.verdict for c in claims if "card" in c.what} == {"sections of the card": HOLDS}
    with LocalHub(tmp_path / "other", token="t") as other:
        push(other, here, name)
        text = card_of(other, name)
    assert "[demo/base](https://huggingface.co/demo/base)" in text and hub.endpoint not in text


def test_words_in_the_folder_go_along(hub, adapter, name):
    save_results(RESULTS, adapter)
    card = focus_hf.FocusModelCard.from_adapter(adapter, repo_id="your-name/x", base_model="demo/base")
    (adapter / "README.md").write_text(f"{card}\nI trained it on my diary.\n")
    push(hub, adapter, name)
    text = card_of(hub, name)
    assert "I trained it on my diary." in text and f"# {name}" in text and "your-name/x" not in text


def test_two_sets_of_words_stop_the_push(hub, api, adapter, name):
    push(hub, adapter, name)
    write_card(api, name, card_of(hub, name) + "\nWords on the Hub.\n")
    (adapter / "README.md").write_text(card_of(hub, name).replace("Words on the Hub.", "Words in the folder."))
    before = api.model_info(name).sha
    with pytest.raises(ValueError, match="bring them together.*--force"):
        push(hub, adapter, name)
    assert api.model_info(name).sha == before
    push(hub, adapter, name, force=True)
    assert "Words in the folder." in card_of(hub, name) and "Words on the Hub." not in card_of(hub, name)


def test_under_a_card_written_by_hand_ours_follows_and_force_replaces_it(hub, api, adapter, name):
    api.create_repo(name)
    write_card(api, name, "---\nlicense: mit\ntags: [law]\n---\n# mine\n\nWhy I made it.\n")
    with pytest.warns(UserWarning, match="written by hand: its words stay, ours follow"):
        push(hub, adapter, name)
    card = card_of(hub, name)
    assert card.index("Why I made it.") < card.index("focus_hf:begin summary") < card.index("focus_hf:begin use")
    data = ModelCard(card).data
    assert data.license == "mit" and {"law", "focus"} <= set(data.tags) and data.library_name == "focus_hf"
    assert push(hub, adapter, name).unchanged
    push(hub, adapter, name, force=True)
    assert "# mine" not in card_of(hub, name) and "focus_hf:card" in card_of(hub, name)


def between(api, monkeypatch, what):
    """Run ``what`` once, after the push has looked at the repository and before its commit."""
    commit, done = HfApi.create_commit, []

    def slow(self, *args, **kwargs):
        if not done:
            done.append(True)
            what()
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", slow)


def test_a_push_in_between_that_concerns_other_files_is_no_matter(hub, api, adapter, name, monkeypatch):
    push(hub, adapter, name)
    save_results(RESULTS, adapter)
    words = card_of(hub, name) + "\nAdded just now.\n"

    def meanwhile():
        api.upload_file(path_or_fileobj=b"x", path_in_repo="notes.txt", repo_id=name)
        write_card(api, name, words)

    between(api, monkeypatch, meanwhile)
    push(hub, adapter, name)
    assert "Added just now." in card_of(hub, name) and "focus_hf:begin quality" in card_of(hub, name)
    assert "notes.txt" in api.list_repo_files(name)


def test_a_push_in_between_that_changes_the_same_file_stops_ours(hub, api, adapter, name, monkeypatch):
    push(hub, adapter, name)
    theirs = b'{"theirs": 1}'
    between(
        api,
        monkeypatch,
        lambda: api.upload_file(path_or_fileobj=theirs, path_in_repo="adapter_config.json", repo_id=name),
    )
    change_weights(adapter, lambda tensors: tensors[sorted(tensors)[0]].add_(1.0))
    with pytest.raises(HubError, match="Somebody pushed adapter_config.json to .* meanwhile"):
        push(hub, adapter, name)
    assert Path(hf_hub_download(name, "adapter_config.json", endpoint=hub.endpoint)).read_bytes() == theirs


@pytest.mark.slow
def test_two_processes_push_at_once_and_nothing_is_lost(hub, adapter, tmp_path, name):
    """Either both arrive one after the other, or one is told to look again; never a mixture."""
    push(hub, adapter, name)
    code = """
import sys, focus_hf
options = {"base_model": "demo/base", "license": "mit", "endpoint": sys.argv[3], "token": "t"}
focus_hf.push_to_hub(sys.argv[1], sys.argv[2], **options)
"""
    folders = []
    for number in (1, 2):
        folder = save_adapter(focus_model("llama"), tmp_path / f"adapter{number}")
        change_weights(folder, lambda tensors, number=number: tensors[sorted(tensors)[0]].fill_(float(number)))
        folders.append(folder)
    arguments = [[sys.executable, "-c", code, str(folder), name, hub.endpoint] for folder in folders]
    running = [subprocess.Popen(a, stderr=subprocess.PIPE, text=True) for a in arguments]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0 or "HubError" in error, error[-2000:]
    assert any(process.returncode == 0 for process in running)
    pulled = focus_hf.pull(name, endpoint=hub.endpoint)
    weights = (pulled / "adapter_model.safetensors").read_bytes()
    assert weights in [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]


def test_five_disjoint_pushes_at_once_all_arrive(hub, api, adapter, name, tmp_path):
    """Each with a figure of its own, to a repository that is not there yet; nobody is told to try again."""
    running = []
    for number in range(5):
        folder = shutil.copytree(adapter, tmp_path / f"adapter{number}")
        (folder / "figures").mkdir()
        (folder / "figures" / f"{number}.png").write_bytes(bytes([number]) * 200)
        command = "import focus_hf_command; focus_hf_command.main()"
        arguments = [sys.executable, "-c", command, "push", str(folder), name, "--base-model", "demo/base"]
        place = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "t", "HF_HOME": str(tmp_path / "home")}
        running.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=place))
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 5, errors
    assert {f"figures/{number}.png" for number in range(5)} <= set(api.list_repo_files(name))


def test_a_branch_that_is_not_there_is_made(hub, api, adapter, name):
    push(hub, adapter, name)
    save_results(RESULTS, adapter)
    push(hub, adapter, name, revision="next")
    assert "focus_results.json" in api.list_repo_files(name, revision="next")
    assert "focus_results.json" not in api.list_repo_files(name)


def test_the_base_model_on_the_hub_gives_its_licence_and_is_checked(hub, api, adapter, name, tmp_path):
    base_model("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: llama3\nlanguage: en\n---\n# base\n")
    api.create_repo("demo/licensed-base", exist_ok=True)
    api.upload_folder(folder_path=tmp_path / "base", repo_id="demo/licensed-base")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        push(hub, adapter, name, base_model="demo/licensed-base", license=None)
    assert api.model_info(name).card_data.license == "llama3"
    other = save_adapter(focus_model("gpt2"), tmp_path / "gpt2")
    config = (other / "adapter_config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
    if '"hidden_size": 48' in config:
        (other / "adapter_config.json").write_text(config)
        change_weights(
            other,
            lambda tensors: tensors.update(
                {k: v.new_zeros(v.shape[0], 48) for k, v in tensors.items() if k.endswith("focus_proj")}
            ),
        )
    with pytest.raises(ValueError, match="hidden_size 48, but demo/licensed-base has 32"):
        push(hub, other, name + "-2", base_model="demo/licensed-base")
    assert not api.repo_exists(name + "-2")


def test_the_card_links_to_the_explorer(hub, adapter, name):
    report("PUNCT").to_json(adapter / "focus_groups.json")
    link = f"({hub.endpoint}/spaces/demo/my-space)"
    push(hub, adapter, name, explorer="demo/my-space")
    assert link in card_of(hub, name)
    push(hub, focus_hf.pull(name, endpoint=hub.endpoint), name)  # and stays
    assert link in card_of(hub, name)
    with pytest.raises(ValueError, match='explorer="org/name"'):
        push(hub, adapter, name, explorer="/a/path", dry_run=True)


def test_links_in_the_folder_are_not_followed(hub, api, adapter, name, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    (adapter / "figures").mkdir()
    (adapter / "figures" / "x.png").symlink_to(tmp_path / "secret.png")
    push(hub, adapter, name)
    assert "figures/x.png" not in api.list_repo_files(name)


# -- Hubs other than ours ------------------------------------------------------------------------------------------


def test_the_card_of_a_branch_that_is_made_starts_from_mains_words(hub, api, adapter, name):
    push(hub, adapter, name)
    write_card(api, name, card_of(hub, name) + "\nMy words on main.\n")
    push(hub, adapter, name, revision="next")
    made = Path(hf_hub_download(name, "README.md", revision="next", endpoint=hub.endpoint)).read_text()
    assert "My words on main." in made


def test_private_does_not_push_to_what_is_public(hub, api, adapter, name):
    push(hub, adapter, name)
    before = api.model_info(name).sha
    with pytest.raises(ValueError, match="exists and is public.*--private"):
        push(hub, adapter, name, private=True)
    assert api.model_info(name).sha == before
    api.update_repo_settings(name, private=True)
    assert push(hub, adapter, name, private=True).unchanged


def test_an_unchanged_push_says_so(hub, adapter, name):
    assert not push(hub, adapter, name).unchanged
    assert push(hub, adapter, name).unchanged


@pytest.mark.parametrize("existing", [False, True])
def test_a_refused_push_leaves_nothing_and_tells_the_whole_reason(hub, api, adapter, name, monkeypatch, existing):
    if existing:
        push(hub, adapter, name)
        save_results(RESULTS, adapter)
    reason = "Because of " + "reasons, " * 60 + "and the last one."
    monkeypatch.setattr(uploads, "_commit", lambda visit, *args: answer(visit.request, HubAnswer(400, reason)))
    with pytest.raises(HubError, match="and the last one"):
        push(hub, adapter, name, revision="next")
    assert api.repo_exists(name) == existing
    if existing:
        assert [branch.name for branch in api.list_repo_refs(name).branches] == ["main"]
