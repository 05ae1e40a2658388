"""Random models, each with every intervention between two calls, compared with the definition.

    python -m tests.adapter.interventions.run --models 500 --json

Of each model, its family, routing, sizes, prompt and padding are drawn from its seed, so that a finding can be looked
at again: ``--first SEED --models 1``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from peft import get_peft_model

from focus_hf import FocusConfig
from focus_hf.adapter import focus_layers
from tests.adapter.interventions.catalogue import INTERVENTIONS
from tests.adapter.interventions.reference import MOST_GROUPS, Reference
from tests.adapter.interventions.session import NotApplicable, Session, Wrong
from tests.families import FAMILIES, base_model

#: A decision this close to being another one may be rounded either way.
CLOSE_CALL = 1e-4


def routings() -> list[str]:
    """What ``routing`` may be here."""
    found = []
    for routing in ("shared", "cells"):
        try:
            FocusConfig(routing=routing)
        except ValueError:
            continue
        found.append(routing)
    return found


def draw_config(chance: random.Random, routing: str) -> FocusConfig:
    """A configuration; of two with one ``routing``, all else may differ."""
    groups = chance.randrange(2, MOST_GROUPS + 1)
    values: dict[str, Any] = {
        "num_groups": groups,
        "local_window": chance.choice([0, 1, 4, 8, 11]),
        "sink_tokens": chance.choice([0, 0, 1, 4]),
        "dense_below": chance.choice([0, 0, 0, 16]),
        "group_dim": chance.choice([2, 8]),
    }
    if routing == "cells":
        values |= {"routing": "cells", "num_bands": chance.choice([1, 2, 4]), "threshold": chance.uniform(-6.0, -2.0)}
    else:
        values["top_k"] = chance.choice([1, 1, min(2, groups), min(3, groups)])
    return FocusConfig(task_type="CAUSAL_LM", **values)


def draw_tensors(model: Any, seed: int) -> None:
    """Random values for all tensors of all adapters: groups and cells that are uneven."""
    generator = torch.Generator().manual_seed(seed)
    spread = {"focus_balance": 0.7, "focus_cell_bias": 1.5, "focus_offset": 0.5, "focus_centroids": 0.5}
    for layer in focus_layers(model):
        for name, tensor in layer.named_parameters():
            kind = name.split(".")[0]
            std = spread.get(kind, tensor.shape[-1] ** -0.5 * (1.0 if "query" in kind or "band" in kind else 1.5))
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * std)


def open_session(seed: int, routing: str, family: str) -> Session:
    """A model with two adapters, in a conversation after its prompt."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    base = base_model(family)
    configs = [draw_config(chance, routing) for _ in range(2)]
    model = get_peft_model(base, configs[0])
    model.add_adapter("other", configs[1])
    draw_tensors(model, seed)
    model.eval()
    batch = chance.choice([1, 1, 2, 3])
    padding = chance.choice([0, 0, 3, 12]) if batch > 1 else 0
    session = Session(model, Reference(base_model(family), model), chance, batch, padding, chance.random() < 0.5)
    session.valid = torch.zeros(batch, 0, dtype=torch.bool)
    config = configs[0]
    about = f"K={config.num_groups} top_k={config.top_k} w={config.local_window} sinks={config.sink_tokens}"
    session.log.append(
        f"seed {seed}: {family}, {routing}, {about} dense_below={config.dense_below}, padding {padding}"
    )
    length = chance.choice([4, 13, 21, 40, 70])
    session.call(length, torch.inference_mode() if chance.random() < 0.3 else nullcontext())
    if chance.random() < 0.5:
        for _ in range(3):
            session.call(1)
    return session


def trial(seed: int, routing: str, family: str, intervention: str) -> dict[str, Any]:
    """One intervention between two calls.

    Returns:
        ``outcome``: "right", "wrong", "raised", "close call" (wrong, where the truth itself hung by a thread), or "not
        applicable"; and what was done.
    """
    session, why = None, ""
    try:
        session = open_session(seed, routing, family)
        INTERVENTIONS[intervention](session)
        for count in (1, 1, session.chance.choice([1, 6])):
            session.call(count)
        outcome = "right"
    except NotApplicable as error:
        outcome, why = "not applicable", str(error)
    except Wrong as error:
        outcome, why = "wrong", str(error)
        if session is not None and session.reference.margin < CLOSE_CALL:
            outcome = "close call"
    except Exception as error:
        outcome = "raised"
        done = ", ".join(session.log) if session is not None else f"seed {seed}: {family}, {routing}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{done}: {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    return {"seed": seed, "intervention": intervention, "outcome": outcome, "why": why[:900]}


def run(models: int, first: int = 0, kinds: list[str] | None = None) -> dict[str, Any]:
    """All interventions with so many models, each of another seed.

    Returns:
        Counts of outcomes, by routing and intervention, and what went wrong.
    """
    kinds = kinds or routings()
    counts: Counter[str] = Counter()
    by: dict[str, Counter[str]] = {}
    found, start = [], time.monotonic()
    for seed in range(first, first + models):
        routing = kinds[seed % len(kinds)]
        family = list(FAMILIES)[(seed // len(kinds)) % len(FAMILIES)]
        for intervention in INTERVENTIONS:
            result = trial(seed, routing, family, intervention)
            counts[result["outcome"]] += 1
            by.setdefault(f"{routing}, {intervention}", Counter())[result["outcome"]] += 1
            if result["outcome"] in ("wrong", "raised"):
                found.append(result)
    seconds = time.monotonic() - start
    return {"models": models, "seconds": seconds, "outcomes": counts, "by": by, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = run(options.models, options.first)
    print(json.dumps(found, indent=1) if options.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    sys.exit(1 if found["found"] else 0)


if __name__ == "__main__":
    main()
