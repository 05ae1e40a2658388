"""Mutated adapters, by the thousand: what the stock loaders make of each, and what `check_adapter` and vLLM's start.

    python -m tests.adapter.fuzz --count 10000 --json

Attempts run in processes of their own, so that a crash or a hang of one is seen and counted. A refusal is Focus' own
or stock: what PEFT and transformers refuse before they know that the adapter is a Focus adapter. Adapters with shared
routing and by cells take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests.adapter.mutations import CONFIG, WEIGHTS, mutate

#: Seconds of processor time after which an attempt counts as a hang, and of waiting after which it is ended.
HANG, GIVE_UP = 5.0, 60.0
#: Memory (MiB) that no attempt may reach: a worker with torch and a tiny model takes about 500.
MEMORY = 1500
#: Characters that a refusal may have, besides the folder's name.
LONGEST = 300

#: What only the base model says, or where it is, or the class that was asked to load it: no check of the adapter's
#: files can know.
OF_THE_BASE = (
    "does not fit",
    "has no place",
    "match none of the attention layers",
    "Expected target PEFT class",
    "Cannot infer the auto class",
    "auto mapping wants to import",
)

#: Whose adapters are mutated.
ROUTINGS = ("shared", "cells")


def peak_memory() -> float:
    """MiB that this process has held at most. ``ru_maxrss`` would count the process from which it was started too."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(next(line for line in status.read_text().splitlines() if "VmHWM" in line).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- one worker ----------------------------------------------------------------------------------------------------


def work(origins: Path, base: Path, seeds: range) -> None:
    """Attempt each seed's adapter and print what came of it, a line of JSON each."""
    import warnings

    import torch
    from transformers import AutoModelForCausalLM, logging

    import focus_hf
    from focus_hf.records import check_adapter
    from focus_hf.vllm.start import read_adapter
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
            origin = origins / ROUTINGS[seed % len(ROUTINGS)]
            kind = mutate(seed, origin, Path(folder), foreign)
            loader = list(LOADERS)[seed // len(ROUTINGS) % len(LOADERS)]
            start = time.process_time()
            checked = _refusal(lambda folder=folder: check_adapter(folder))
            served = _refusal(lambda folder=folder: read_adapter({"adapter": folder}))
            attempt = Attempt(loader, base, Path(folder))
            error: BaseException | None = attempt.error
            late = None
            if attempt.model is not None:
                try:
                    with torch.no_grad():
                        past = attempt.model(input_ids=ids, use_cache=True).past_key_values
                        attempt.model(input_ids=ids[:, :1], past_key_values=past)
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
                "one_line": attempt.is_one_line and text.isprintable() and len(text.replace(folder, "")) <= LONGEST,
                "checked": checked,
                "disagree": _disagree(checked, served, error, Path(folder), base),
                "names": "does not fit" in text
                or CONFIG in text
                or WEIGHTS in text
                or "target_modules" in text
                or "exclude_modules" in text,
            }
        print(json.dumps(found), flush=True)


def _refusal(opens: Callable[[], Any]) -> str | None:
    """Why an adapter is refused."""
    try:
        opens()
    except ValueError as error:
        return str(error)[: 2 * LONGEST]
    except Exception as error:
        return f"{type(error).__name__}, which is no refusal: {error}"[: 2 * LONGEST]
    return None


def _disagree(
    checked: str | None, served: str | None, error: BaseException | None, folder: Path, base: Path
) -> str | None:
    """How the answers of check, vLLM's start and a loader differ, if they do."""
    for said in (checked, served):
        if said is not None and ("no refusal" in said or len(said.replace(str(folder), "")) > LONGEST):
            return f"not one short line: {said}"
    if (checked is None) != (served is None):
        return f"check says {checked}, vLLM {served}"
    if checked is not None and error is None:
        return f"check refuses what is loaded: {checked}"
    if checked is None and error is not None and not any(part in str(error) for part in OF_THE_BASE):
        named = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
        if named == str(base):
            return f"check passes what is refused: {type(error).__name__}: {error}"[:600]
    return None


# -- the whole -----------------------------------------------------------------------------------------------------


def run(count: int, first: int = 0, batch: int = 500) -> dict[str, Any]:
    """Attempt ``count`` mutated adapters.

    Returns:
        Counts, and the attempts that broke a promise, under ``broken``.
    """
    from tests.adapter.strangers import save_base_and_adapters

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base, origins = save_base_and_adapters(Path(folder), ROUTINGS)
        seed = first
        while seed < first + count:
            seeds = range(seed, min(seed + batch, first + count))
            done = _watch(base, origins, seeds)
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
        "disagree": sum(bool(found.get("disagree")) for found in results),
        "base_changed": sum(bool(found.get("changed")) for found in results),
        "slowest": max(found.get("seconds", 0) for found in results),
        "memory": max(found.get("memory", 0) for found in results),
        "kinds": Counter(found.get("kind", "?") for found in results),
        "broken": broken[:20],
        "num_broken": len(broken),
    }


def _breaks(found: dict[str, Any]) -> bool:
    if "crash" in found or "hang" in found or found["changed"] or found["fails_later"] or found["disagree"]:
        return True
    if found["seconds"] > HANG or found["memory"] > MEMORY:
        return True
    return bool(found["ours"]) and not (found["one_line"] and found["names"])


def _watch(base: Path, origins: Path, seeds: range) -> list[dict[str, Any]]:
    """Run a worker; one that dies or hangs is ended, and the attempt at which it was says so."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.adapter.fuzz",
        "--work",
        str(origins),
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
