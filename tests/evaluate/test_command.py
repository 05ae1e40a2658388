"""`focus-hf eval` as a user runs it, the retrieval probe, and benchmarks from local task files."""

from __future__ import annotations

import json

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from focus_hf.adapter import FocusConfig, focus_layers
from focus_hf.adapter.save import save_adapter
from focus_hf.evaluate import Haystack, Mode, list_modes, perplexity, probe_retrieval, token_losses
from focus_hf.evaluate.command import add_to_adapter
from focus_hf.hub import load_adapted
from focus_hf.records import load_results
from focus_hf.texts import tokenize_windows
from tests.cli.test_cli import focus_hf, program, refusal
from tests.families import focus_model, logits, token_ids

TRAIN = [
    "--num-groups",
    "4",
    "--local-window",
    "8",
    "--seq-len",
    "64",
    "--max-steps",
    "2",
    "--trainer",
    "use_cpu=true",
]


def texts(tiny):
    return ["--model", tiny / "base", "--train-file", tiny / "train.txt", "--eval-file", tiny / "held_out.txt"]


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapter") / "adapter"
    done = focus_hf(
        "train",
        *texts(tiny),
        "--output-dir",
        out,
        "--eval-windows",
        "4",
        "--gate",
        "additive",
        *TRAIN,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # and nothing else on standard output
    assert answer["folder"] == str(out) and answer["results"]["training"]["optimizer steps"] == 2
    return out


def test_eval_as_json_on_the_screen(adapter, tiny):
    done = focus_hf(
        "eval",
        "--adapter",
        adapter,
        "--text",
        tiny / "held_out.txt",
        "--retention",
        tiny / "train.txt",
        "--seq-len",
        "32,64",
        "--modes",
        "dense,local,soft,hard",
        "--top-k",
        "1,2",
        "--max-tokens",
        "400",
        "--retrieval",
        "64",
        "--trials",
        "2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    measured = [(e["data"], e["context_length"], len(e["rows"])) for e in document["evaluations"]]
    assert measured == [("held_out.txt", 32, 5), ("held_out.txt", 64, 5), ("train.txt", 32, 5), ("train.txt", 64, 5)]
    assert [(row["length"], row["mode"]) for row in document["retrieval"]] == [
        (64, "dense"),
        (64, "local"),
        (64, "hard"),
        (64, "hard"),
    ]
    model, tokenizer, _ = load_adapted(str(adapter))
    windows = tokenize_windows(tokenizer, (tiny / "held_out.txt").read_text(), 64)[: 400 // 64]
    hard = next(row for row in document["evaluations"][1]["rows"] if row["top_k"] == 1)
    assert hard["perplexity"] == pytest.approx(perplexity(model, windows), rel=1e-4)


def test_a_warning_is_a_note_on_standard_error(tiny, tmp_path):
    """This adapter's training had no soft attention to measure."""
    base = AutoModelForCausalLM.from_pretrained(tiny / "base")
    config = FocusConfig(num_groups=4, local_window=8, task_type="CAUSAL_LM")
    folder = save_adapter(get_peft_model(base, config), tmp_path / "adapter")
    options = ["--text", tiny / "held_out.txt", "--seq-len", "32", "--max-tokens", "64"]
    done = focus_hf("eval", "--adapter", folder, *options, "--modes", "soft,hard", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Note: This adapter was trained through hard attention") == 1
    assert ".py" not in done.stderr
    assert [row["mode"] for row in json.loads(done.stdout)["evaluations"][0]["rows"]] == ["hard"]


def test_eval_into_files_and_into_the_adapter(adapter, tiny, tmp_path):
    done = focus_hf(
        "eval",
        "--adapter",
        adapter,
        "--text",
        tiny / "held_out.txt",
        "--seq-len",
        "64",
        "--stride",
        "0.5",
        "--max-tokens",
        "400",
        "--json",
        tmp_path / "e.json",
        "--plots",
        tmp_path / "plots",
        "--write",
    )
    assert done.returncode == 0, done.stderr
    assert "Perplexity on held_out.txt, 64 tokens" in done.stdout
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["positions.png", "quality.png"]
    (evaluation,) = json.loads((tmp_path / "e.json").read_text())["evaluations"]
    assert evaluation["stride"] == 32 and evaluation["tokens"] == 63 + 32 * ((400 - 64) // 32)
    results = load_results(adapter)
    assert [(e.context_length, e.stride) for e in results.evaluations] == [(64, 64), (64, 32)]
    assert results.training["optimizer steps"] == 2  # what training wrote stays
    card = focus_hf("card", "--adapter", adapter, "--base-model", "org/base").stdout
    assert "windows of 64 tokens, each token with at least 32 before it (" in card
    add_to_adapter(results, adapter)
    assert load_results(adapter) == results  # the same again replaces itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to measure: give --text, --dataset, --ruler, --code or --tasks"),
        (
            ["--text", "{text}", "--modes", "fast"],
            "window, random, quest, blocks, slash, clusters, clusters-estimate, streaming, oracle, quest-gqa, "
            "clusters-gqa, clusters-estimate-gqa, oracle-gqa, got 'fast'",
        ),
        (["--text", "{text}", "--top-k", "5"], "top_k must be from 1 to num_groups (4), got 5"),
        (["--text", "{text}", "--seq-len", "100000"], "fewer than one window of 100000"),
        (["--text", "{text}", "--seq-len", "1"], "Context lengths must be at least 2 tokens, got 1"),
        (["--text", "{text}", "--stride", "2"], "stride must be a share above 0 and at most 1, got 2.0"),
        (["--text", "{text}", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["--text", "{text}", "--model", "/no/such/base"], "The base model /no/such/base of"),
        (["--text", "{text}", "--adapter", "/no/such"], "adapter_config.json does not exist"),
        (["--text", "{text}", "--adapter", "org/name", "--write"], "pull org/name into one first"),
    ],
)
def test_mistakes_are_one_line(adapter, tiny, arguments, message):
    filled = [part.format(text=tiny / "held_out.txt") for part in arguments]
    assert message in refusal("eval", "--adapter", adapter, *filled)


def test_train_mistakes_are_one_line(tiny, tmp_path, capsys):
    base = ["train", "--model", tiny / "base", "--output-dir", tmp_path / "out"]
    text = ["--train-file", tiny / "train.txt"]
    for arguments, message in (
        (base, "Give either text files or the name of a data set"),
        ([*base, *text, "--trainer", "speed"], "--trainer takes name=value, got 'speed'"),
        (
            [*base, *text, "--seq-len", "64", "--local-window", "8", "--trainer", "speed=3"],
            "trainer: got an unexpected keyword argument 'speed'",
        ),
        ([*base, *text, "--seq-len", "64"], "Use a seq_len of at least 134"),
        ([*base, *text, "--top-k", "9"], "top_k (9) cannot exceed num_groups (8)"),
        (["train", *text], "model is missing: give --model"),
        ([*base, "--train-file", "/no/such/file"], "No such file or directory"),
    ):
        assert message in refusal(*arguments)


def test_a_yaml_file_and_flags_over_it(tiny, tmp_path):
    (tmp_path / "train.yaml").write_text(
        f"model: {tiny / 'base'}\ntrain_file: {tiny / 'train.txt'}\noutput_dir: {tmp_path / 'out'}\nnum_groups: 4\n"
        "local_window: 8\nseq_len: 64\nmax_steps: 50\neval_windows: 2\ntrainer: {use_cpu: true}\n"
    )
    done = focus_hf("train", "--config", tmp_path / "train.yaml", "--max-steps", "1", "--straight-through")
    assert done.returncode == 0, done.stderr
    assert "The adapter is in" in done.stdout and "train.txt, last 5%" in done.stdout
    assert load_results(tmp_path / "out").training["optimizer steps"] == 1
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["straight_through"] is True


class Copier(nn.Module):
    """A model that has seen: it predicts that what followed a token before follows it again."""

    def __init__(self, model, reach):
        super().__init__()
        self.model, self.reach = model, reach

    def forward(self, input_ids, past_key_values=None, logits_to_keep=0, **kwargs):
        answer = self.model(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        ids = getattr(past_key_values, "seen_ids", []) + input_ids[0].tolist()
        answer.past_key_values.seen_ids = ids  # a copy of the cache takes it along
        first = len(ids) - input_ids.shape[1]
        for i in range(max(first, 9), len(ids)):
            for j in range(max(0, i - self.reach), i):
                if ids[j] == ids[i] and ids[j - 3 : j] == ids[i - 3 : i]:
                    answer.logits[0, i - first, ids[j + 1]] += 100.0
        return answer


def test_the_probe_tells_who_remembers_from_who_does_not():
    ids = token_ids(batch=1, length=600)[0]
    model = focus_model("llama")
    rows = {}
    for reach in (40, 200):
        copier = Copier(model, reach)
        (rows[reach],) = probe_retrieval(copier, ids, [160], [Mode("dense"), Mode("soft")], trials=3)
    assert rows[200].exact == 1.0 and rows[200].gain > 2.0 and rows[200].loss < 0.1
    assert rows[40].exact == 0.0 and abs(rows[40].gain) < 0.5
    assert rows[200].length == 160 and rows[200].trials == 3


def test_the_probe_hides_what_it_asks_for():
    ids = token_ids(batch=1, length=600)[0]
    hay = Haystack.make(ids, 200, 5, depth=0.5, key_tokens=4, value_tokens=6)
    assert hay.text.shape == (190,) and hay.present.shape == hay.absent.shape == (5, 10)
    windows = hay.text.unfold(0, 10, 1)
    places = [int((windows == needle).all(dim=-1).nonzero()) for needle in hay.present]
    gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
    assert places[0] == 7 and gaps == {24}  # 70 tokens, half of the hay, with 5 needles in between
    assert not any(bool((windows == needle).all(dim=-1).any()) for needle in hay.absent)
    rest = torch.ones(190, dtype=torch.bool)
    for place in places:
        rest[place : place + 10] = False
    assert bool((ids.unfold(0, 140, 1) == hay.text[rest]).all(dim=-1).any())  # the text itself, in its order
    again = Haystack.make(ids, 200, 5, depth=0.5, key_tokens=4, value_tokens=6)
    assert torch.equal(again.text, hay.text) and torch.equal(again.present, hay.present)
    with pytest.raises(ValueError, match="1 needles and a question of 16 tokens need 34 tokens, got length 20"):
        Haystack.make(ids, 20, 1)
    with pytest.raises(ValueError, match="The text has 10 tokens, but a prompt of 100 needs 68"):
        Haystack.make(ids[:10], 100, 1)


def test_the_probe_sees_what_a_mode_attends_to():
    """A needle out of the window is nothing to local attention: the gain is what is left through the layers."""
    model, ids = focus_model("llama", top_k=4), token_ids(batch=1, length=600)[0]
    dense, local, everything = probe_retrieval(
        model, ids, [200], list_modes(["dense", "local", "hard"], [4]), trials=4
    )
    assert everything.gain == pytest.approx(dense.gain, abs=1e-4)
    assert abs(local.gain) < abs(dense.gain)  # three layers of eight tokens reach 24 far, the needles are farther


@pytest.mark.slow  # the harness takes most of a minute to import
def test_benchmarks_of_a_local_task_file(adapter, tmp_path):
    pytest.importorskip("lm_eval")
    examples = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(12)]
    (tmp_path / "even.jsonl").write_text("\n".join(map(json.dumps, examples)))
    (tmp_path / "even.yaml").write_text(
        "task: focus_even\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'even.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    done = program(
        "eval",
        "--adapter",
        adapter,
        "--tasks",
        "focus_even",
        "--task-path",
        tmp_path,
        "--limit",
        "10",
        "--json",
        tmp_path / "e.json",
        "--write",
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "e.json").read_text())["benchmarks"]
    assert (row["task"], row["metric"], row["examples"]) == ("focus_even", "acc", 10)
    assert 0 <= row["dense"] <= 1 and 0 <= row["focus"] <= 1
    assert "| focus&#95;even | acc |" in focus_hf("card", "--adapter", adapter, "--base-model", "org/base").stdout
    done = focus_hf("eval", "--adapter", adapter, "--tasks", "no_such_task")
    assert done.returncode == 1 and "has no task 'no_such_task'" in done.stderr


def test_the_harness_runs_dense_and_focus():
    """What the harness computes in each run is the model in that mode."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from focus_hf.demo.tiny_base import train_tokenizer
    from focus_hf.evaluate import attending

    model = focus_model("llama")
    tokenizer = train_tokenizer("a b c d e f g h " * 50)
    ids = token_ids(batch=1, length=50)
    answers = {}
    for mode in (Mode("dense"), Mode("hard", 1)):
        with attending(model, mode):
            harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
            ((answers[mode], _),) = harness._loglikelihood_tokens(
                [(("", ""), ids[0, :30].tolist(), ids[0, 30:].tolist())]
            )
            assert answers[mode] == pytest.approx(-token_losses(model, ids)[0, 29:].sum().item(), rel=1e-4)
    assert answers[Mode("dense")] != pytest.approx(answers[Mode("hard", 1)], rel=1e-4)


def test_loading_an_adapter_for_evaluation_routes(adapter, tiny):
    model, _, folder = load_adapted(str(adapter))
    assert folder == adapter and len(focus_layers(model)) == 2
    ids = token_ids(batch=1, length=60)
    with_focus = logits(model, ids)
    model.disable_adapters()
    assert not torch.equal(with_focus, logits(model, ids))
