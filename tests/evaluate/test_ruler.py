"""RULER's tasks: what their rules say, lengths in the model's own tokens, scores by generation and by likelihood."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from focus_hf.card import FocusModelCard
from focus_hf.evaluate import Mode, RulerPlan, attending, measure_ruler, ruler_figure, token_losses
from focus_hf.evaluate.report import tables
from focus_hf.evaluate.ruler.prompts import make_prompts
from focus_hf.evaluate.ruler.run import answer_losses, generate_answer, read_question
from focus_hf.evaluate.ruler.tasks import KEYS, TASKS, string_match_all
from focus_hf.hub import load_adapted
from focus_hf.records import Results, load_results, ruler_tables
from tests.cli.test_cli import focus_hf
from tests.families import CELLS

LENGTH = 500


def with_random_groups(base, folder, **changes):
    """The base with an adapter whose groups are random: as a model, its tokenizer, its folder."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from focus_hf.adapter.save import save_adapter
    from tests.families import focus_config, unbalance

    torch.manual_seed(0)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base), focus_config(**changes))
    unbalance(made)
    return load_adapted(str(save_adapter(made, folder)))


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    return with_random_groups(tiny / "base", tmp_path_factory.mktemp("ruler") / "adapter")


@pytest.fixture(scope="module")
def by_cells(tiny, tmp_path_factory):
    curves = {str(position): [[-3.0, 0.1], [-8.0, 0.9]] for position in (100, 400)}
    cells = {**CELLS, "pairs_curves": curves}
    return with_random_groups(tiny / "base", tmp_path_factory.mktemp("ruler") / "cells", **cells)


def sentences(task, size=40, seed=3):
    example = TASKS[task].make(Random(seed), size, 2048)
    return example, example.question.split("\n")


def test_a_needle_in_noise_stands_there_once():
    example, lines = sentences("niah_single_1")
    (needle,) = [line for line in lines if "One of the special magic numbers" in line]
    key, value = re.fullmatch(r"One of the special magic numbers for (\S+) is: (\d{7})\.", needle).groups()
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    assert lines.count(noise) == 40 and key in KEYS
    assert example.answers == (value,) and f"special magic number for {key} mentioned" in lines[-1]
    assert lines[0].startswith("A special magic number is hidden within the following text.")
    assert example.prefix == f" The special magic number for {key} mentioned in the provided text is"


@pytest.mark.parametrize(("task", "value"), [("niah_multikey_2", r"\d{7}"), ("niah_multikey_3", r"[0-9a-f-]{36}")])
def test_one_needle_among_others_has_the_key(task, value):
    example, lines = sentences(task)
    needles = [re.fullmatch(rf"One of the special magic \w+ for (\S+) is: ({value})\.", line) for line in lines[1:-1]]
    assert len(needles) == 41 and all(needles)
    asked = re.search(r" for (\S+) mentioned", lines[-1]).group(1)
    assert [needle.group(2) for needle in needles if needle.group(1) == asked] == list(example.answers)


def test_a_chain_of_variables_gives_its_value_to_all_of_them():
    example, lines = sentences("vt")
    start = lines.index("Memorize and track the chain(s) of variable assignment hidden in the following text.", 1)
    values, value = {}, re.search(r"assigned the value (\d+) in", lines[-1]).group(1)
    for line in lines[start:]:
        if match := re.fullmatch(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", line):
            values[match.group(1)] = values.get(match.group(2), match.group(2))
    assert values == dict.fromkeys(example.answers, value) and len(values) == 5
    shown = "\n".join(lines[:start])  # the solved example has names of three letters, and their answer
    assert re.search(r"5 variables are assigned the value \d+, they are: [A-Z]{3}( [A-Z]{3}){4}\n", shown)


@pytest.mark.parametrize("size", [TASKS["fwe"].smallest, 300, 2000])
def test_the_answer_is_the_three_most_frequent_words(size):
    example, _ = sentences("fwe", size=size)
    text = example.question.split("coded words. ")[1].split("\nQuestion")[0].split()
    counted = Counter(text).most_common(5)
    assert counted[0][0] == "..." and tuple(word for word, _ in counted[1:4]) == example.answers
    assert counted[3][1] > counted[4][1]
    assert counted[1][1] == int(size / 4 / (torch.pi**2 / 6))  # frequencies of a zeta distribution


def test_scores_are_those_of_ruler():
    answers = ("Alpha", "beta", "gamma", "delta")
    assert string_match_all("it is ALPHA, then alphabeta.", answers) == 0.5


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length_in_the_models_own_tokens(model, task):
    _, tokenizer, _ = model
    length = 3 * LENGTH
    prompts = make_prompts(tokenizer, task, length, samples=3)
    unit = 110  # a needle of UUIDs is the longest
    for prompt in prompts:
        total = len(prompt.ids) + TASKS[task].new_tokens
        assert length - unit < total <= length
        assert prompt.answered[: len(prompt.ids)] == prompt.ids  # this tokenizer joins no answer to its prompt
        assert tokenizer.decode(prompt.answered[-prompt.answer_tokens :]) == " " + " ".join(prompt.answers)
    assert prompts == make_prompts(tokenizer, task, length, samples=5)[:3]
    assert len({prompt.answers for prompt in prompts + make_prompts(tokenizer, task, length, 1, seed=1)}) == 4
    with pytest.raises(ValueError, match=rf"RULER's {task} needs at least \d+ tokens with this tokenizer, got 150"):
        make_prompts(tokenizer, task, 150, 1)


def test_a_chat_template_is_used_where_there_is_one(model):
    _, tokenizer, _ = model
    plain = make_prompts(tokenizer, "niah_single_1", LENGTH, 1)[0]
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    try:
        chat = make_prompts(tokenizer, "niah_single_1", LENGTH, 1)[0]
    finally:
        tokenizer.chat_template = None
    text = tokenizer.decode(chat.ids)
    assert text.startswith("<user>A special magic number") and "</user>\n<assistant>\nThe special magic" in text
    assert "assistant" not in tokenizer.decode(plain.ids)
    assert len(chat.ids) + chat.new_tokens <= LENGTH


def test_likelihood_and_generation_are_the_models(model):
    """By plain losses of the whole text, and by picking the first choice token by token without a cache."""
    plain, tokenizer, _ = model
    prompt = make_prompts(tokenizer, "niah_single_1", LENGTH, 1)[0]
    ids = torch.tensor(prompt.answered)[None]
    for mode in (Mode("dense"), Mode("hard", 1)):
        with attending(plain, mode):
            losses, first = answer_losses(plain, prompt, read_question(plain, prompt))
            torch.testing.assert_close(
                losses, token_losses(plain, ids)[0, -prompt.answer_tokens :], rtol=1e-4, atol=1e-5
            )
            with torch.no_grad():
                logits = plain(input_ids=ids, use_cache=False).logits[0]
                assert torch.equal(first, logits[:-1].argmax(-1)[-len(first) :] == ids[0, -len(first) :])
                said = list(prompt.ids)
                for _ in range(4):
                    said.append(int(plain(input_ids=torch.tensor(said)[None], use_cache=False).logits[0, -1].argmax()))
            expected = tokenizer.decode(said[len(prompt.ids) :], skip_special_tokens=True)
            said = generate_answer(plain, tokenizer, prompt, read_question(plain, prompt))
            assert said.startswith(expected)


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("mode", ["hard", "quest", "streaming"])
def test_what_is_asked_can_read_another_share_after_a_document(by_cells, mode, share):
    """As a user would do it: one call reads the document, another what is asked, the dial turned between them."""
    plain, tokenizer, _ = by_cells
    prompt, last = make_prompts(tokenizer, "niah_single_1", LENGTH, 1)[0], 40
    document, ids = len(prompt.answered) - prompt.answer_tokens - last, torch.tensor(prompt.answered)[None]
    text, before = ids[:, : len(prompt.ids) - last], Mode(mode, budget="0.2", width=None if mode == "hard" else 60)
    plan = RulerPlan([LENGTH], ["niah_single_1"], samples=1, question_tokens=last, question_pairs=share)
    (row,) = measure_ruler(plain, tokenizer, plan, [before])
    with torch.no_grad(), attending(plain, before, text):
        cache = plain(input_ids=ids[:, :document], use_cache=True).past_key_values
    keys = round(share * text.shape[1])  # the last one's own, four first ones, and a window
    later = Mode("hard", budget=str(share)) if mode == "hard" else Mode(mode, width=keys - 5)
    of = None if mode == "hard" else text  # its dial at every position, not tuned to a length
    with torch.no_grad(), attending(plain, Mode("dense") if share == 1 else later, of):
        logits = plain(input_ids=ids[:, document:], past_key_values=cache).logits[0, -prompt.answer_tokens - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1).gather(-1, ids[0, -prompt.answer_tokens :, None]).mean()
    assert row.logprob == pytest.approx(float(expected), rel=1e-4)
    assert (row.question_tokens, row.question_pairs) == (last, share) and row.pairs < 0.5
    (alike,) = measure_ruler(plain, tokenizer, replace(plan, question_tokens=0, question_pairs=1.0), [before])
    assert abs(alike.logprob - row.logprob) > 1e-4
    how = "densely" if share == 1 else "with 80 % of what is before them"
    assert (
        ruler_tables([row.to_dict()])[0].lines[0][0] == f"niah_single_1, the last 40 tokens and the answer read {how}"
    )


def test_dense_attention_reads_what_is_asked_as_it_reads_a_document(by_cells):
    plain, tokenizer, _ = by_cells
    plan = RulerPlan([LENGTH], ["niah_single_1"], samples=1)
    rows = [
        next(measure_ruler(plain, tokenizer, replace(plan, question_tokens=n, question_pairs=p), [Mode("dense")]))
        for n, p in ((0, 1.0), (40, 1.0), (40, 0.5))
    ]
    assert rows[1].logprob == rows[2].logprob == pytest.approx(rows[0].logprob, rel=1e-4)
    assert rows[0].score == rows[1].score == rows[2].score


def test_a_model_that_knows_the_answer_gets_all_points(model):
    """Logits that spell the right answer: every measure is full, and generation stops at the last word of it."""
    plain, tokenizer, _ = model
    spelled = [p.answered for p in make_prompts(tokenizer, "fwe", LENGTH, 2)]

    def know(module, args, kwargs, output):
        seen = kwargs["input_ids"][0].tolist()
        if output.past_key_values is None:  # pairs are counted, nothing is asked
            return output
        there = output.past_key_values.get_seq_length()
        if there == len(seen):
            know.spelled = next(whole for whole in spelled if whole[:there] == seen)
        count = output.logits.shape[1]
        for i, following in enumerate(range(there - count + 1, there + 1)):
            if following < len(know.spelled):
                output.logits[0, i, know.spelled[following]] += 100.0
        return output

    handle = plain.register_forward_hook(know, with_kwargs=True)
    try:
        plan = RulerPlan([LENGTH], ["fwe"], samples=2)
        rows = list(measure_ruler(plain, tokenizer, plan, [Mode("dense"), Mode("soft"), Mode("hard", 1)]))
    finally:
        handle.remove()
    assert [(row.mode, row.score, row.accuracy) for row in rows] == [("dense", 1.0, 1.0), ("hard", 1.0, 1.0)]
    assert all(-1e-3 < row.logprob <= 0 for row in rows) and rows[0].pairs == 1.0 and rows[1].pairs < 1.0
    without = next(iter(measure_ruler(plain, tokenizer, plan, [Mode("dense")])))
    assert without.score < 1 and without.accuracy < 1 and without.logprob < -1


def test_tables_have_a_line_for_each_task_and_a_column_for_each_mode(tmp_path):
    def row(task, length, mode, score):
        values = {"mode": mode, "top_k": 1 if mode == "hard" else None, "accuracy": 0.5, "logprob": -1.0, "pairs": 1.0}
        return {"task": task, "length": length, "score": score, "samples": 3, "seed": 0, **values}

    rows = [row("vt", 64, "dense", 0.9), row("vt", 32, "dense", 1.0), row("vt", 32, "hard", 0.5)]
    rows += [row("fwe", 32, "hard", 0.25)]
    short, long = ruler_tables(rows)
    assert (short.length, long.length, short.samples) == (32, 64, 3)
    assert [column["mode"] for column in short.modes] == ["dense", "hard"]
    assert short.lines == [
        ("vt", ["100 %, -1.00", "50 %, -1.00"]),
        ("fwe", ["", "25 %, -1.00"]),
        ("pairs attended", ["100 %", "100 %"]),
    ]
    assert len(list(tables(Results(ruler=rows)))) == 2
    assert ruler_figure(rows, tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")


def test_on_the_command_line_without_any_text(model, tmp_path):
    plain, tokenizer, folder = model
    asked = ["--ruler", LENGTH, "--ruler-tasks", "niah_single_1,fwe", "--ruler-samples", "1", "--modes", "dense,hard"]
    asked += ["--ruler-question", 40]
    files = ["--plots", tmp_path / "plots", "--json", tmp_path / "r.json"]
    done = focus_hf("eval", "--adapter", folder, *asked, *files, "--write")
    assert done.returncode == 0, done.stderr
    assert "(nats per token), 500 tokens, 1 prompts" in " ".join(done.stdout.split())
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["ruler.png"]
    results = load_results(folder)
    assert json.loads((tmp_path / "r.json").read_text())["ruler"] == results.ruler
    modes = [Mode("dense"), Mode("hard", 1)]
    again = measure_ruler(
        plain, tokenizer, RulerPlan([LENGTH], ["niah_single_1", "fwe"], 1, question_tokens=40), modes
    )
    for row, here in zip(results.ruler, again, strict=True):
        for name, value in here.to_dict().items():  # the same questions and answers in another process
            assert row[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)
    card = str(FocusModelCard.from_adapter(folder, repo_id="me/focus", base_model="org/base"))
    assert (
        "at 500 tokens, 1 prompts of each task" in card
        and "| niah&#95;single&#95;1, the last 40 tokens and the answer" in card
    )


def test_mistakes_name_the_value_and_what_was_expected(model):
    plain, tokenizer, _ = model
    with pytest.raises(ValueError, match=r"RULER's niah_single_1 needs at least \d+ tokens .* got 100\."):
        next(measure_ruler(plain, tokenizer, RulerPlan([100], ["niah_single_1"]), [Mode("dense")]))
    with pytest.raises(ValueError, match="RULER's tasks here are niah_single_1, .* got 'qa_1'"):
        RulerPlan([500], ["qa_1"])
    with pytest.raises(ValueError, match=r"question_tokens is at most half of the shortest .*, 250 .* got 251\."):
        RulerPlan([600, 500], ["vt"], question_tokens=251)
    with pytest.raises(ValueError, match=r"question_pairs is a share, above 0 and at most 1; got 30"):
        RulerPlan([600], ["vt"], question_tokens=64, question_pairs=30)
    with pytest.raises(ValueError, match=r"question_pairs \(0\.3\) is of question_tokens: give both"):
        RulerPlan([600], ["vt"], question_pairs=0.3)
