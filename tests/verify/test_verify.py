"""A card is only worth what another machine measures: claims that hold, claims that do not, claims out of reach."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from focus_hf.card import FocusModelCard
from focus_hf.card.read import read_card
from focus_hf.evaluate.leave import take_sample
from focus_hf.hub import load_adapted
from focus_hf.records import load_results
from focus_hf.records.adapter_files import weights_hash
from focus_hf.records.sample import TokenSample, same_groups
from focus_hf.texts import TextSource, read_again
from focus_hf.train import TrainRecipe, train
from focus_hf.verify import DIFFERS, HOLDS, UNCHECKED, verify
from focus_hf.verify.claims import all_hold
from tests.cli.test_cli import focus_hf as run


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """An adapter trained on a text file, with a group report and a card, as a user makes them."""
    out = tmp_path_factory.mktemp("verify") / "adapter"
    train(
        TrainRecipe(
            model=str(tiny / "base"),
            output_dir=str(out),
            train_file=[str(tiny / "train.txt")],
            num_groups=4,
            local_window=8,
            seq_len=64,
            stride=48,
            max_steps=3,
            batch_size=2,
            eval_windows=3,
            calibration_windows=6,
            trainer={"disable_tqdm": True},
        )
    )
    done = run("groups", "--adapter", out, "--text", tiny / "held_out.txt", "--seq-len", "128", "--write")
    assert done.returncode == 0, done.stderr
    card = FocusModelCard.from_adapter(out, repo_id="me/tiny-focus", base_model="org/base")
    (out / "README.md").write_text(str(card))
    return out


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "adapter")


def verdicts(claims):
    return {claim.what: claim.verdict for claim in claims}


def texts(tiny):
    return [str(tiny / "train.txt"), str(tiny / "held_out.txt")]


def test_an_honest_card_holds_in_every_point(adapter, tiny):
    claims = verify(str(adapter), texts=texts(tiny))
    assert {claim.verdict for claim in claims} == {HOLDS}, [c for c in claims if c.verdict != HOLDS]
    whats = " / ".join(claim.what for claim in claims)
    for part in (
        "weights",
        "parameters",
        "sections of the card",
        "recorded tokens",
        "top_k=1",
        "largest group",
        "layers.1",
    ):
        assert part in whats, part
    results = load_results(adapter)
    measured = [c for c in claims if c.what.startswith("perplexity")]
    assert [float(c.claimed.split()[0]) for c in measured] == pytest.approx(
        [row["perplexity"] for row in results.evaluations[0].rows], abs=1e-3
    )


def test_what_is_out_of_reach_is_said_and_does_not_count_against_it(adapter, tiny):
    claims = verify(str(adapter))
    assert all_hold(claims)
    missing = [claim for claim in claims if claim.verdict == UNCHECKED]
    assert len(missing) == 3 and all("needs train.txt" in c.note or "needs held_out.txt" in c.note for c in missing)
    changed = tiny / "changed.txt"  # the same name is not the same text
    changed.write_text((tiny / "train.txt").read_text() + "x")
    assert verdicts(verify(str(adapter), texts=[str(changed)])) == verdicts(claims)


def test_some_lengths_alone_can_be_measured(adapter, tiny):
    length = load_results(adapter).evaluations[0].context_length
    edit_results(
        adapter, lambda values: values["evaluations"].append({**values["evaluations"][0], "context_length": 32})
    )
    claims = [c for c in verify(str(adapter), texts=texts(tiny), lengths=[length]) if c.what.startswith("perplexity")]
    left_out = [claim for claim in claims if f", {length} tokens" not in claim.what]
    assert [(c.verdict, c.note) for c in left_out] == [(UNCHECKED, "another length was asked for")]
    assert len(claims) > 1 and all(claim.verdict == HOLDS for claim in claims if claim not in left_out)
    done = run("verify", adapter, "--seq-len", f"{length},999")
    assert done.returncode == 1 and f"no perplexity at 999 tokens, but at 32, {length}." in done.stderr


def edit_results(folder, change):
    path = folder / "focus_results.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_number_that_was_made_up_is_found(adapter, tiny):
    def lie(values):
        values["evaluations"][0]["rows"][-1]["perplexity"] *= 0.9
        values["largest_group"] = 0.25 if values["largest_group"] > 0.27 else 0.5

    edit_results(adapter, lie)
    claims = verify(str(adapter), texts=texts(tiny))
    differing = [claim.what for claim in claims if claim.verdict == DIFFERS]
    assert not all_hold(claims)
    assert any("top_k=2" in what for what in differing)
    assert "largest group on the training text" in differing
    assert "card, section quality" in differing  # the text still has the old number
    assert not any("top_k=1" in what for what in differing)


def test_other_weights_are_found(adapter, tiny):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(0)
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, path)
    found = verdicts(verify(str(adapter)))
    assert found["weights that the quality belongs to"] == DIFFERS
    assert found["groups of 64 recorded tokens, same"] == DIFFERS
    assert found["parameters"] == HOLDS
    assert found["card, section provenance"] == DIFFERS


def test_a_card_whose_numbers_were_changed_by_hand_is_found(adapter):
    text = read_card(adapter)
    (adapter / "README.md").write_text(text.replace("weights are unchanged", "weights are better"))
    claims = verify(str(adapter), files_only=True)
    wrong, all_sections = [claim for claim in claims if claim.verdict == DIFFERS]
    assert wrong.what == "card, section summary" and wrong.measured == "changed by hand"
    assert all_sections.measured == "7 of 8"
    (adapter / "README.md").write_text(f"{text}\nMy own words do not count against it.\n")
    assert all_hold(verify(str(adapter), files_only=True))


def test_a_folder_of_the_repository_s_name_is_no_matter(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "tiny-focus").mkdir(parents=True)  # as the card is called
    assert all_hold(verify(str(adapter), files_only=True))


def test_on_the_command_line(adapter, tiny):
    done = run("verify", adapter, *(part for text in texts(tiny) for part in ("--text", text)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The card holds." in done.stdout and "differs" not in done.stdout
    edit_results(adapter, lambda values: values["evaluations"][0]["rows"][0].update(perplexity=1.5))
    done = run("verify", adapter, "--text", tiny / "train.txt", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and answer["holds"] is False
    assert [c["claimed"] for c in answer["claims"] if c["verdict"] == "differs" and "dense" in c["what"]] == [
        "1.500 (100.0 % of pairs)"
    ]
    done = run("verify", "/no/such/adapter")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_a_sample_says_where_groups_differ(adapter):
    model, _, _ = load_adapted(str(adapter))
    sample = TokenSample.load(adapter)
    assert sample.weights_sha256 == weights_hash(adapter) and len(sample.ids) == 64 and sample.top_k == 1
    again = take_sample(model, torch.tensor(sample.ids))
    assert same_groups(sample, again) == 1.0 and sample.groups.keys() == again.groups.keys()
    name = next(iter(again.groups))
    again.groups[name][:16] = [(group + 1) % 4 for group in again.groups[name][:16]]
    assert same_groups(sample, again) == 1 - 16 / (64 * 2)


def test_texts_are_found_again_by_their_content(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # a Hub out of reach is tried again
    source = TextSource((str(tiny / "train.txt"), str(tiny / "held_out.txt")))
    texts = source.load()
    moved = [shutil.copy(file, tmp_path / f"renamed{i}.txt") for i, file in enumerate(source.files)]
    assert read_again(texts.source, texts.revision, moved).documents == texts.documents
    head, tail = texts.split_tail(0.1)
    for part in (head, tail):
        assert read_again(part.source, part.revision, moved).documents == part.documents
    assert read_again(texts.source, texts.revision, moved[:1]) is None
    assert read_again({"dataset": "org/none"}, "0" * 40) is None and read_again({}, "sha256:x") is None
