"""Mutated adapters, by the thousand: what the stock loaders make of each.

    python -m tests.adapter.fuzz --count 10000 --json

Attempts run in processes of their own, so that a crash or a hang of one is seen and counted. A refusal is Focus' own
or stock: what PEFT and transformers refuse before they know that the adapter is a Focus adapter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, Any

#: Seconds of processor time after which an attempt counts as a hang, and of waiting after which it is ended.
HANG, GIVE_UP = 5.0, 60.0
#: Memory (MiB) that no attempt may reach: a worker with torch and a tiny model takes about 500.
MEMORY = 1500

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peak_memory() -> float:
    """MiB that this process has held at most. ``ru_maxrss`` would count the process from which it was started too."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(next(line for line in status.read_text().splitlines() if "VmHWM" in line).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- mutations -----------------------------------------------------------------------------------------------------


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """A JSON value such as nobody expects."""
    plain = [None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**30, 10**400, -(10**30), 0.5, 1e308, -0.0, 1e-300]
    plain += [float("nan"), float("inf"), "", "a", "x" * 2000, "\x00", "\x1b[2J", "‮", "../../etc/passwd", "FOCUS"]
    plain += ["(([a-z_0-9]+)+\\.?)+!", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1m\\2o", "(" * 300, "[", ".*", "all-linear"]
    if depth < 3 and chance.random() < 0.3:
        size = chance.choice([0, 1, 3, 300])
        if chance.random() < 0.5:
            return [any_value(chance, depth + 1) for _ in range(size)]
        return {str(any_value(chance, 3)): any_value(chance, depth + 1) for _ in range(size)}
    return chance.choice(plain)


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Some bytes changed, taken out, put in, repeated, or cut off."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 30])):
        at = chance.randrange(max(1, min(len(changed), chance.choice([8, 1500, len(data) or 1]))))
        match chance.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at:at] = chance.randbytes(chance.choice([1, 4, 100]))
            case 2:
                del changed[at : at + chance.choice([1, 8, 500])]
            case 3:
                changed[at:at] = changed[at : at + 50]
            case 4 if chance.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def mutate_header(chance: random.Random, data: bytes, foreign: list[tuple[str, list[int]]]) -> bytes:
    """The table of a safetensors file changed: names, types, shapes, offsets; and tensors put in that fit the base."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(chance.choice([1, 1, 2])):
        names = [name for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
        name = chance.choice(names)
        entry = header[name]
        match chance.randrange(8):
            case 0:
                new, shape = chance.choice(foreign)
                size = 4
                for dimension in shape:
                    size *= dimension
                header[new] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + size]}
                body += struct.pack("<f", 7.0) * (size // 4)
            case 1:
                header[
                    chance.choice([f"evil.{name}", name[3:], name + ".default", name.replace("0", "77"), "\n\x1b[31m"])
                ] = header.pop(name)
            case 2:
                entry["dtype"] = chance.choice(["F16", "BF16", "I32", "BOOL", "F8_E4M3", "F64", "X", 7, None])
            case 3:
                entry["shape"] = chance.choice(
                    [[], [1], [-1, 32], [2**62, 2], list(entry.get("shape") or [3])[::-1], [0], "32", None]
                )
            case 4:
                entry["data_offsets"] = chance.choice([[0, 0], [0, 2**60], [8, 4], [-8, 0], [1.5, 2], [], None])
            case 5:
                del header[name]
            case 6:
                header["__metadata__"] = any_value(chance)
            case 7:
                header[name] = any_value(chance)
    table = json.dumps(header).encode()
    return struct.pack("<Q", chance.choice([len(table)] * 8 + [0, 2**40, len(table) + 9])) + table + body


def mutate_numbers(chance: random.Random, data: bytes) -> bytes:
    """Numbers of the tensors set to what numbers can be."""
    start = 8 + struct.unpack("<Q", data[:8])[0]
    changed = bytearray(data)
    for _ in range(chance.choice([1, 5, 200])):
        at = start + 4 * chance.randrange((len(data) - start) // 4)
        value = chance.choice([float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 0.0, 1e-45])
        changed[at : at + 4] = struct.pack("<f", value)
    return bytes(changed)


def mutate_config(chance: random.Random, data: bytes) -> bytes:
    """Values of the configuration changed, taken out or put in, or its text damaged."""
    values = json.loads(data)
    match chance.randrange(8):
        case 0:
            return mutate_bytes(chance, data)
        case 1 if chance.random() < 0.2:
            depth = chance.choice([500, 5_000, 100_000])
            return json.dumps(values).encode()[:-1] + b', "deep": ' + b"[" * depth + b"]" * depth + b"}"
        case 2:
            values.pop(chance.choice(sorted(values)))
        case 3:
            values[str(any_value(chance, 3))] = any_value(chance)
        case _:
            for _ in range(chance.choice([1, 1, 1, 3])):
                values[chance.choice(sorted(values))] = any_value(chance)
    sys.set_int_max_str_digits(0)
    return json.dumps(values).encode()


def mutate(seed: int, origin: Path, target: Path, foreign: list[tuple[str, list[int]]]) -> str:
    """Write a mutated copy of an adapter; returns what was done to it."""
    chance = random.Random(seed)
    files = {name: (origin / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    kind = chance.choice(["bytes", "header", "header", "numbers", "config", "config", "config"])
    if kind == "bytes":
        files[WEIGHTS] = mutate_bytes(chance, files[WEIGHTS])
    elif kind == "header":
        files[WEIGHTS] = mutate_header(chance, files[WEIGHTS], foreign)
    elif kind == "numbers":
        files[WEIGHTS] = mutate_numbers(chance, files[WEIGHTS])
    else:
        files[CONFIG] = mutate_config(chance, files[CONFIG])
    for name, data in files.items():
        (target / name).write_bytes(data)
    return kind


# -- one worker ----------------------------------------------------------------------------------------------------


def work(origin: Path, base: Path, seeds: range) -> None:
    """Attempt each seed's adapter and print what came of it, a line of JSON each."""
    import warnings

    import torch
    from transformers import AutoModelForCausalLM, logging

    import focus_hf
    from tests.adapter.strangers import LOADERS, Attempt, base_hash
    from tests.families import token_ids

    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    package = os.path.dirname(focus_hf.__file__)
    untouched = AutoModelForCausalLM.from_pretrained(base)
    expected, ids = base_hash(untouched), token_ids(batch=1, length=20)
    tensors = dict(untouched.state_dict())
    foreign = [(p + name, list(t.shape)) for name, t in tensors.items() for p in ("", "base_model.model.")]
    print("ready", flush=True)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            kind = mutate(seed, origin, Path(folder), foreign)
            loader = list(LOADERS)[seed % len(LOADERS)]
            start = time.process_time()
            attempt = Attempt(loader, base, Path(folder))
            error: BaseException | None = attempt.error
            late = None
            if attempt.model is not None:
                try:
                    with torch.no_grad():
                        attempt.model(input_ids=ids)
                except Exception as failed:
                    late = f"{type(failed).__name__}: {failed}"[:300]
            frames = [] if error is None else [f.filename for f in traceback.extract_tb(error.__traceback__)]
            text = str(error)
            found = {
                "seed": seed,
                "kind": kind,
                "loader": loader,
                "seconds": time.process_time() - start,
                "memory": peak_memory(),
                "loaded": attempt.model is not None,
                "fails_later": late,
                "changed": attempt.base is not None and base_hash(attempt.base) != expected,
                "ours": any(name.startswith(package) for name in frames),
                "error": None if error is None else f"{type(error).__name__}: {text}"[:600],
                "one_line": attempt.is_one_line and text.isprintable() and len(text) < 1000,
                "names": "does not fit" in text
                or CONFIG in text
                or WEIGHTS in text
                or "target_modules" in text
                or "exclude_modules" in text,
            }
        print(json.dumps(found), flush=True)


# -- the whole -----------------------------------------------------------------------------------------------------


def run(count: int, first: int = 0, batch: int = 500) -> dict[str, Any]:
    """Attempt ``count`` mutated adapters.

    Returns:
        Counts, and the attempts that broke a promise, under ``broken``.
    """
    from tests.adapter.strangers import save_base_and_adapter

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base, origin = save_base_and_adapter(Path(folder))
        seed = first
        while seed < first + count:
            seeds = range(seed, min(seed + batch, first + count))
            done = _watch(base, origin, seeds)
            results += done
            seed += len(done)
    broken = [found for found in results if _breaks(found)]
    refused = [found for found in results if not found.get("loaded")]
    return {
        "attempts": len(results),
        "loaded": len(results) - len(refused),
        "refused_by_focus": sum(bool(found.get("ours")) for found in refused),
        "refused_before_focus": Counter(
            found["error"].partition(":")[0] for found in refused if found.get("error") and not found.get("ours")
        ),
        "crashes": sum("crash" in found for found in results),
        "hangs": sum("hang" in found or found.get("seconds", 0) > HANG for found in results),
        "base_changed": sum(bool(found.get("changed")) for found in results),
        "slowest": max(found.get("seconds", 0) for found in results),
        "memory": max(found.get("memory", 0) for found in results),
        "kinds": Counter(found.get("kind", "?") for found in results),
        "broken": broken[:20],
        "num_broken": len(broken),
    }


def _breaks(found: dict[str, Any]) -> bool:
    if "crash" in found or "hang" in found or found["changed"] or found["fails_later"]:
        return True
    if found["seconds"] > HANG or found["memory"] > MEMORY:
        return True
    return bool(found["ours"]) and not (found["one_line"] and found["names"])


def _watch(base: Path, origin: Path, seeds: range) -> list[dict[str, Any]]:
    """Run a worker; one that dies or hangs is ended, and the attempt at which it was says so."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.adapter.fuzz",
        "--work",
        str(origin),
        str(base),
        f"{seeds.start}:{seeds.stop}",
    ]
    with tempfile.TemporaryFile("w+") as said:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
        try:
            return _results(worker, seeds, said)
        finally:
            worker.kill()
            worker.communicate()


def _results(worker: subprocess.Popen[str], seeds: range, said: IO[str]) -> list[dict[str, Any]]:
    """What a worker prints, as long as it lives and goes on."""
    results: list[dict[str, Any]] = []
    ready = False
    assert worker.stdout is not None
    while len(results) < len(seeds):
        if not select.select([worker.stdout], [], [], GIVE_UP * (1 if ready else 5))[0]:
            return [*results, {"seed": seeds[len(results)], "hang": True}]
        line = worker.stdout.readline()
        if line.strip() == "ready":
            ready = True
        elif line.startswith("{"):
            results.append(json.loads(line))
        elif not line:
            said.seek(0)
            end = said.read()[-2000:]
            if not ready:
                raise RuntimeError(f"The worker did not start: {end}")
            return [*results, {"seed": seeds[len(results)], "crash": worker.wait(), "stderr": end}]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        start, stop = map(int, options.work[2].split(":"))
        work(Path(options.work[0]), Path(options.work[1]), range(start, stop))
        return
    found = run(options.count, options.first)
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    sys.exit(1 if found["num_broken"] else 0)


if __name__ == "__main__":
    main()
