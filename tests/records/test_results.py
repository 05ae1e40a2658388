"""Records come back from their files as they were written, and what is none is told in a line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from focus_hf.records import AdapterFileError, Evaluation, Results, TokenSample, load_results, save_results
from tests.records.figures import RESULTS, ROWS


def test_results_round_trip(tmp_path):
    assert load_results(tmp_path) is None
    save_results(RESULTS, tmp_path)
    assert load_results(tmp_path) == RESULTS
    with pytest.raises(ValueError, match="perplexity of mode 'dense' is nan"):
        Evaluation("x", 1, [{**ROWS[0], "perplexity": float("nan")}])
    with pytest.raises(ValueError, match="loaded of mode 'dense' is 'all'"):
        Evaluation("x", 1, [{**ROWS[0], "loaded": "all"}])
    (tmp_path / "focus_results.json").write_text('{"schema": 9}')
    with pytest.raises(AdapterFileError, match="schema 9.*upgrade"):
        load_results(tmp_path)


def test_what_is_measured_again_replaces_itself_and_nothing_else():
    def row(**values):
        return {
            "task": "vt",
            "length": 32,
            "samples": 3,
            "seed": 0,
            "mode": "hard",
            "budget": "0.1",
            "score": 0.1,
        } | values

    first, other = Evaluation("x", 8, ROWS), Evaluation("x", 16, ROWS)
    kept = [row(), row(length=64), row(budget="0.2"), row(mode="dense", budget=None), row(task="fwe"), row(samples=9)]
    probe = [{"length": 8, "mode": "dense", "trials": 2, "gain": 1.0}]
    known = Results([first, other], ruler=kept, retrieval=probe, weights_sha256="a", training={"seed": 1})
    better, quest = {**ROWS[0], "perplexity": 1.5}, {**ROWS[0], "mode": "quest"}
    again = Results([Evaluation("x", 16, [better, quest])], ruler=[row(score=0.9), row(mode="quest")], code=[row()])
    known.add(replace(again, weights_sha256="a"))
    assert known.evaluations == [first, Evaluation("x", 16, [better, *ROWS[1:], quest])]
    assert known.ruler == [row(score=0.9), *kept[1:], row(mode="quest")]
    assert known.retrieval == probe and known.code == [row()]
    known.add(Results([Evaluation("x", 16, ROWS[:1], tokens=9)], weights_sha256="a"))  # of more or less text
    assert known.evaluations == [first, Evaluation("x", 16, ROWS[:1], tokens=9)]
    known.add(Results(code=[row(score=0.3)], weights_sha256="b"))
    assert known == Results(code=[row(score=0.3)], weights_sha256="b", training={"seed": 1})


def test_files_of_the_first_format_are_read_and_written_as_they_are_now(tmp_path):
    path = tmp_path / "focus_results.json"
    path.write_text(json.dumps({"schema": 1, "evaluations": [{"data": "x", "context_length": 8, "rows": ROWS}]}))
    results = load_results(tmp_path)
    assert results.ruler == [] and results.evaluations[0].copies is None
    save_results(results, tmp_path)
    assert json.loads(path.read_text())["schema"] == 2 and load_results(tmp_path) == results


def test_samples_round_trip(tmp_path):
    assert TokenSample.load(tmp_path) is None
    sample = TokenSample([3, 1, 2], {"a": [0, 1, 1], "b": [2, 2, 0]}, top_k=1, weights_sha256="f" * 64)
    sample.save(tmp_path)
    assert TokenSample.load(tmp_path) == sample
    for damaged in ('{"ids": [1]}', "[]", '{"ids": [1], "groups": {"a": [1, 2]}, "top_k": 1}', "{"):
        (tmp_path / "focus_sample.json").write_text(damaged)
        with pytest.raises(AdapterFileError, match="focus_sample.json"):
            TokenSample.load(tmp_path)
