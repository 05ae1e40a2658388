"""Machine code for a CPU: the same answers as the definition, and what happens where it cannot be had."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_hf.attention import (
    Pattern,
    Problem,
    Scores,
    WhoAttends,
    decode_in_place,
    focus_attention,
    masked_focus_attention,
    native,
    reads_in_place,
)
from focus_hf.attention.paths import choose_path, usable_paths
from focus_hf.routing import cells
from focus_hf.routing.cells import CellRouter
from tests.attention.cases import calls, expected_of, general, make_call, relative_error, shared

compiled = pytest.mark.skipif(native.missing() is not None, reason="no C++ compiler")


@compiled
@settings(max_examples=120, deadline=None)
@given(
    case=calls,
    routing=general | shared,
    length=st.integers(1, 900),
    repeat=st.integers(1, 9),
    head_dim=st.sampled_from([4, 16, 20, 64, 72, 128]),
    chunk=st.sampled_from([1.0, 0.9, 0.3, 0.01, 0.0]),
)
def test_it_equals_the_definition(case, routing, length, repeat, head_dim, chunk):
    case = {**case, "length": length, "repeat": repeat, "head_dim": head_dim, "batch": min(case["batch"], 2)}
    problem, mask = make_call(case, {**routing, "extra_mask": "none"}, chunk)
    assert usable_paths(problem)[0] == "native" == choose_path(problem)
    expected = expected_of(problem, mask)
    assert relative_error(focus_attention(problem, path="native"), expected) <= 1e-5
    narrow = replace(problem, **{name: getattr(problem, name).bfloat16() for name in ("query", "key", "value")})
    widened = replace(narrow, **{name: getattr(narrow, name).float() for name in ("query", "key", "value")})
    output = focus_attention(narrow, path="native")
    assert output.dtype == torch.bfloat16
    assert relative_error(output, expected_of(widened, mask)) <= 2**-8


@compiled
@pytest.mark.parametrize("queries", [1, 200])
def test_threads_change_nothing(queries):
    case = {"seed": 1, "batch": 2, "kv_heads": 3, "repeat": 2, "length": 5000, "head_dim": 24, "narrow_values": True}
    case |= {"window": 20, "sinks": 3, "dense_below": 0, "padding": "none", "documents": False, "sink_logits": True}
    routing = {"groups": 40, "bands": 4, "share": 0.1, "choosers": "query heads", "extra_mask": "none"}
    problem, _ = make_call({**case, "token_major": True}, routing, queries / 5000)
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outputs.append(focus_attention(problem, path="native"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert relative_error(outputs[0], expected_of(problem)) <= 1e-5


@compiled
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    size=st.sampled_from([1, 7, 16, 64]),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 5),
    bands=st.integers(1, 5),
    window=st.integers(0, 40),
    dense_below=st.sampled_from([0, 50]),
    narrow=st.booleans(),
    each=st.booleans(),
)
def test_keys_in_an_engines_blocks_are_read_where_they_stand(
    seed, lengths, size, kv_heads, repeat, bands, window, dense_below, narrow, each
):
    """One new token each of several sequences; what is no key of theirs is NaN."""
    generator, most, dim = torch.Generator().manual_seed(seed), -(-max(lengths) // size), 20
    number = len(lengths) * most + 2
    table = torch.randperm(number, generator=generator)[: len(lengths) * most].view(len(lengths), most).int()
    pattern, scores = Pattern(window, 3, dense_below, bands), Scores(0.3)
    query = torch.randn(len(lengths), kv_heads * repeat, 1, dim, generator=generator)
    query = query.bfloat16() if narrow else query
    choosers = kv_heads * repeat if each else kv_heads
    reads = torch.rand(len(lengths), choosers, 1, 9, bands, generator=generator) < 0.3
    groups = torch.randint(9, (number, size, kv_heads), generator=generator, dtype=torch.uint8).transpose(1, 2)
    both = query.new_full((number, size, kv_heads, 2 * dim), torch.nan).transpose(1, 2)
    key, value = both[..., :dim], both[..., dim:]
    expected = []
    for row, length in enumerate(lengths):
        own = torch.randn(kv_heads, length, 2 * dim, generator=generator).to(query.dtype)
        blocks, places = table[row].long()[torch.arange(length) // size], torch.arange(length) % size
        both[blocks, :, places] = own.transpose(0, 1)
        of_keys = groups[blocks, :, places].T[None]
        who = WhoAttends(pattern, torch.arange(length)[None], of_keys, reads[row : row + 1])
        exact = (x[None].double() for x in (query[row], *own.split(dim, dim=-1)))
        expected.append(masked_focus_attention(Problem(*exact, who, scores)))
    assert reads_in_place(query, key, groups, scores)
    positions = torch.tensor(lengths) - 1
    found = decode_in_place(query, key, value, groups, reads, positions, table, pattern, scores)
    assert relative_error(found, torch.cat(expected)) <= (2**-8 if narrow else 1e-5)


@compiled
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 8),
    dim=st.sampled_from([4, 10, 64]),
    groups=st.integers(1, 256),
    dimensions=st.integers(1, 16),
    bands=st.integers(1, 8),
    queries=st.integers(1, 70),
    narrow=st.booleans(),
    each=st.booleans(),
)
def test_cells_that_are_read_are_those_of_the_definition(
    seed, batch, kv_heads, repeat, dim, groups, dimensions, bands, queries, narrow, each
):
    """But where a share equals its limit to within rounding."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=generator) / 3

    choosers, width = (kv_heads * repeat, dim) if each else (kv_heads, repeat * dim)
    projections = some(kv_heads, dimensions, dim), some(kv_heads, groups, dimensions), some(kv_heads, groups)
    scores = some(choosers, dimensions, width), some(choosers, bands + 1, width), some(choosers, groups * bands + 1)
    router = CellRouter(*projections, *scores, some(choosers))
    asked = some(batch, queries, kv_heads * repeat, dim).transpose(1, 2)
    asked = asked.bfloat16() if narrow else asked
    limits = some(*((batch if seed % 2 else 1), queries, bands)) - 4
    found = native.cell_reads(asked, router, limits)
    exact = cells.cell_log_shares(asked.double(), CellRouter(*(x.double() for x in router.tensors().values())))
    over = (
        exact[..., :-1].unflatten(-1, (groups, bands)) - (limits[:, None] + router.offset.view(-1, 1, 1))[..., None, :]
    )
    assert torch.equal(found[over.abs() > 1e-4], (over > 0)[over.abs() > 1e-4])
    alone = torch.cat(
        [native.cell_reads(asked[:, :, i : i + 1], router, limits[:, i : i + 1]) for i in range(queries)], 2
    )
    assert torch.equal(alone[over.abs() > 1e-4], found[over.abs() > 1e-4])


PROGRAM = """
import logging, torch
logging.basicConfig(format="%(message)s")
from focus_hf.attention import Pattern, Problem, Scores, WhoAttends, focus_attention, native
from focus_hf.attention.paths import choose_path
q = torch.ones(1, 1, 40, 8)
who = WhoAttends(Pattern(4, 1), torch.arange(40)[None], torch.zeros(1, 1, 40, dtype=torch.uint8),
                 torch.zeros(1, 1, 40, 1, 1, dtype=torch.bool), first_position=0)
problem = Problem(q, q, q, who, Scores(0.3))
assert torch.allclose(focus_attention(problem), q)
print(native.missing(), choose_path(problem), sep="|")
"""


def run(cache: Path, **variables: str) -> tuple[str, str, str]:
    """Why there is no library, the path that was taken, and what was logged, in a process of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    why, path = done.stdout.strip().split("|")
    return why, path, done.stderr


def compiler(folder: Path, body: str) -> str:
    """A compiler of this name that does what a shell is told."""
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def passes_again(names: str, cache: Path, compiler: str) -> bool:
    """Whether tests of this file pass, none skipped, with another compiler's library."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", names, "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": compiler}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode == 0 and "SKIPPED" not in done.stdout


#: Of a compiler that does not know it.
NO_OPENMP = 'case "$*" in *-fopenmp*) echo "no OpenMP" >&2; exit 1;; esac; '


@compiled
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("name", ["g++", "clang++", "g++ without OpenMP"])
def test_other_compilers_and_narrower_registers(tmp_path, name, level):
    name, _, without = name.partition(" ")
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    own = compiler(tmp_path, f'{NO_OPENMP if without else ""}exec {name} "$@" -march={level}')
    assert passes_again("definition or threads_change", tmp_path, own)


@compiled
def test_it_is_compiled_once(tmp_path):
    own = compiler(tmp_path, f'echo x >> {tmp_path}/calls; exec c++ "$@"')
    for _ in range(2):
        assert run(tmp_path / "cache", CXX=own) == ("None", "native", "")
    assert (tmp_path / "calls").read_text() == "x\n"
    assert [file.suffix for file in (tmp_path / "cache/focus_hf").iterdir()] == [".so"]


@compiled
def test_without_openmp_threads_are_the_languages_own(tmp_path):
    own = compiler(tmp_path, f'{NO_OPENMP}exec c++ "$@"')
    assert passes_again("threads_change", tmp_path, own)
    failing = compiler(tmp_path, "exit 1")
    assert not passes_again("threads_change", tmp_path / "another", failing)  # it would tell


@compiled
def test_zigs_compiler_is_taken_where_the_machine_has_none(tmp_path):
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    path = f"os.environ['PATH'] = {os.environ['PATH']!r}"
    (package / "__main__.py").write_text(f"import os, sys\n{path}\nos.execvp(sys.argv[1], sys.argv[1:])\n")
    seen = os.pathsep.join([str(tmp_path), *sys.path])
    for logged in ("Focus attention is compiled for this processor, once: about a minute.\n", ""):
        assert run(tmp_path / "cache", PATH="", CXX="", PYTHONPATH=seen) == ("None", "native", logged)


@compiled
def test_a_kept_file_that_is_broken_or_may_be_others_is_not_run(tmp_path):
    log = f"echo x >> {tmp_path}/calls"
    own = compiler(tmp_path, f'{log}; exec c++ "$@"')
    for spoil in (lambda file: None, lambda file: file.write_bytes(b"no library"), lambda file: file.chmod(0o777)):
        for file in tmp_path.glob("cache/focus_hf/*"):
            spoil(file)
        assert run(tmp_path / "cache", CXX=own) == ("None", "native", "")
    assert (tmp_path / "calls").read_text() == "x\n" * 3


@compiled
def test_without_a_place_to_keep_it_each_process_makes_its_own():
    assert run(Path("/dev/null/nowhere"))[:2] == ("None", "native")


def test_a_compiler_that_fails_is_said_once_and_attention_works(tmp_path):
    own = compiler(tmp_path, "echo 'no such flag' >&2; exit 1")
    why, path, logged = run(tmp_path / "cache", CXX=own)
    assert path == "masked" and why.endswith("does not compile it: no such flag") and logged.count("no such flag") == 1


def test_it_can_be_switched_off(tmp_path):
    assert run(tmp_path, FOCUS_HF_NATIVE="0") == ("FOCUS_HF_NATIVE is 0", "masked", "")
    why, path, logged = run(tmp_path, PATH="", CXX="")
    if importlib.util.find_spec("ziglang") is None:
        assert why.startswith("there is no C++ compiler (c++, g++ or clang++") and (path, logged) == ("masked", "")
    assert list(tmp_path.iterdir()) == []
