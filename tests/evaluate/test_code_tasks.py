"""Tasks on code: what their rules say, exact lengths, losses against whole passes, on the command line."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from focus_hf.card.card import FocusModelCard
from focus_hf.evaluate import CodePlan, Mode, attending, measure_code, token_losses
from focus_hf.evaluate.code_tasks.completion import functions, make_completion_prompts
from focus_hf.evaluate.code_tasks.names import make_names_prompts, second_uses
from focus_hf.evaluate.code_tasks.run import losses_of
from focus_hf.evaluate.code_tasks.sources import standard_library
from focus_hf.evaluate.report import tables
from focus_hf.hub import load_adapted
from focus_hf.records import Results, load_results
from tests.cli.test_cli import focus_hf

LENGTH = 500


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """The tiny base with an adapter whose groups are random: as a model, its tokenizer, its folder."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from focus_hf.adapter.save import save_adapter
    from tests.families import focus_config, unbalance

    torch.manual_seed(0)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny / "base"), focus_config())
    unbalance(made)
    return load_adapted(str(save_adapter(made, tmp_path_factory.mktemp("code") / "adapter")))


CODE = '''import alpha  # alpha in a comment is no use, nor is "beta"
def beta(gamma, self):
    """alpha and gamma"""
    delta = gamma + len(gamma)
    return alpha.beta(delta)
'''


def test_second_uses_are_those_of_names_and_of_nothing_else():
    offsets = [(place, place + 1) for place in range(len(CODE))]  # a token for each character
    found = {CODE[use.tokens[0] : use.tokens[-1] + 1]: use for use in second_uses(CODE, offsets)}
    assert sorted(found) == ["alpha", "beta", "delta", "gamma"]
    firsts = {"alpha": CODE.index("alpha"), "beta": CODE.index("beta("), "gamma": CODE.index("gamma")}
    seconds = {"alpha": CODE.index("alpha.beta"), "beta": CODE.index("beta(delta"), "gamma": CODE.index("gamma +")}
    for name, use in list(found.items()):
        if name != "delta":
            assert use.tokens[0] == seconds[name] and use.distance == seconds[name] - firsts[name]


def test_a_name_that_is_cut_is_not_used():
    end = CODE.index("alpha.beta") + 3
    offsets = [(place, place + 1) for place in range(end)]
    assert [CODE[use.tokens[0] : use.tokens[-1] + 1] for use in second_uses(CODE, offsets)] == ["gamma"]
    assert second_uses("def broken(:\n  'no end", [(0, 3), (3, 20)]) == []


def test_names_prompts_are_starts_of_modules(model):
    _, tokenizer, _ = model
    prompts = make_names_prompts(tokenizer, LENGTH, 4)
    starts = [source.text for source in standard_library()]
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids)
        assert len(prompt.ids) == LENGTH and len(prompt.asked) >= 5
        assert any(start.startswith(text[:-5]) for start in starts)
        for use in prompt.asked:
            name = re.search(r"\w+", tokenizer.decode(prompt.ids[list(use.tokens)])).group()
            before = tokenizer.decode(prompt.ids[: use.tokens[0]])
            assert re.search(rf"\b{name}\b", before) and 0 < use.distance <= use.tokens[0]
    again = make_names_prompts(tokenizer, LENGTH, 4)
    assert all(torch.equal(one.ids, two.ids) for one, two in zip(prompts, again, strict=True))
    other = make_names_prompts(tokenizer, LENGTH, 4, seed=1)
    assert not all(torch.equal(one.ids, two.ids) for one, two in zip(prompts, other, strict=True))


def test_an_answer_stands_in_the_first_file_only(model):
    _, tokenizer, _ = model
    for prompt in make_completion_prompts(tokenizer, 900, 3):
        (asked,) = prompt.asked
        start = asked.tokens[0]
        assert len(prompt.ids) == 900 and asked.tokens == tuple(range(start, 900))
        question = tokenizer.decode(prompt.ids[:start], skip_special_tokens=True)
        answer = tokenizer.decode(prompt.ids[start:], skip_special_tokens=True)
        name, shown = re.search(r"def (\w+)(\(.*)$", question).groups()
        parameters = (shown + answer)[1:]
        assert parameters.endswith("):") and question.count(parameters) == 1
        assert f"def {name}({parameters}" in question
        back = tokenizer.decode(prompt.ids[: start - asked.distance])
        assert back.endswith(f"{parameters}\n") and asked.distance > 300


def test_functions_are_those_whose_line_says_all():
    (source,) = [source for source in standard_library() if source.name == "shutil"]
    found = {function.name: function for function in functions(source)}
    assert found["copyfileobj"].parameters == "fsrc, fdst, length=0):"
    assert found["copyfileobj"].shown.endswith("def copyfileobj(fsrc, fdst, length=0):\n")
    assert "copytree" not in found and not any(name.startswith("_") for name in found)


def test_losses_are_those_of_a_whole_pass(model):
    plain, tokenizer, _ = model
    ids = make_names_prompts(tokenizer, LENGTH, 1)[0].ids
    with attending(plain, Mode("hard", 1)):
        whole = token_losses(plain, ids[None])[0]
        losses, first = losses_of(plain, ids, [1, 30, 499])
        logits = plain(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(losses, whole[[0, 29, 498]], rtol=1e-4, atol=1e-4)
    assert first.tolist() == [int(logits[at - 1].argmax()) == int(ids[at]) for at in (1, 30, 499)]


def test_every_mode_answers_the_same(model):
    plain, tokenizer, _ = model
    modes = [Mode("dense"), Mode("hard", 1), Mode("quest", 1)]
    rows = list(measure_code(plain, tokenizer, CodePlan([LENGTH], samples=2), modes))
    assert [(row.task, row.mode) for row in rows] == [(t, m.name) for t in ("names", "completion") for m in modes]
    uses = [use for prompt in make_names_prompts(tokenizer, LENGTH, 2) for use in prompt.asked]
    for row in rows[:3]:
        assert sum(stretch["names"] for stretch in row.by_distance) == len(uses) and row.exact is None
        assert {stretch["above"] for stretch in row.by_distance} <= {0, 64, 256}
    prompts = make_completion_prompts(tokenizer, LENGTH, 2)
    with attending(plain, Mode("dense")):
        answers = [token_losses(plain, prompt.ids[None])[0, prompt.asked[0].tokens[0] - 1 :] for prompt in prompts]
    assert rows[3].loss == pytest.approx(torch.cat(answers).mean().item(), rel=1e-4)
    assert rows[3].exact == 0.0 and rows[3].distance == min(prompt.asked[0].distance for prompt in prompts)
    assert rows[3].pairs == 1.0 and rows[5].pairs == pytest.approx(rows[4].pairs, abs=0.01)
    (table,) = tables(Results(code=[row.to_dict() for row in rows]))
    assert table.row_count == 1 + len({stretch["above"] for row in rows for stretch in row.by_distance}) + 1
    assert len(table.columns) == 1 + len(modes)


def test_on_the_command_line_without_any_text(model, tmp_path):
    *_, folder = model
    asked = ["--code", LENGTH, "--code-samples", "1", "--modes", "dense,hard,window"]
    done = focus_hf("eval", "--adapter", folder, *asked, "--json", tmp_path / "c.json", "--write")
    assert done.returncode == 0, done.stderr
    assert "Code, loss (nats per token), 500 tokens, 1 prompts" in " ".join(done.stdout.split())
    rows = json.loads((tmp_path / "c.json").read_text())["code"]
    assert load_results(folder).code == rows
    card = str(FocusModelCard.from_adapter(folder, repo_id="me/focus", base_model="org/base"))
    assert "Python code of 500 tokens, 1 prompts" in card and "rest of a line that stands" in card
    assert [(row["task"], row["mode"]) for row in rows[:3]] == [("names", m) for m in ("dense", "hard", "window")]
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_mistakes_name_the_value_and_what_was_expected(model):
    _, tokenizer, _ = model
    with pytest.raises(ValueError, match=r"has \d modules of 90000 tokens, 50 were asked for"):
        make_names_prompts(tokenizer, 90_000, 50)
    with pytest.raises(ValueError, match="made 0 prompts of 100 tokens, 3 were asked for"):
        make_completion_prompts(tokenizer, 100, 3)
    tokenizer = type("Slow", (), {"is_fast": False})()
    with pytest.raises(ValueError, match="load a fast tokenizer"):
        make_names_prompts(tokenizer, 100, 1)
