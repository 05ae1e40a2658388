"""One family after the other, each in a process of its own with a time limit."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import resource
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from .checks import CHECKS, layers, logits, routed, tokens
from .tiny import tiny_model, variant_of

#: What `examine` found, by name.
Found = dict[str, dict[str, Any]]

#: Seconds of processor time, and of waiting, for a family.
CPU_SECONDS, WAIT_SECONDS = 120, 900


def examine(family: str, default: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What becomes of a family: ``right``, ``refused``, ``wrong``, ``obscure``, or it is ``not made``.

    Args:
        family: a model type.
        default: what was found without the changes; it is what is found with them where they route no other layers.
        changes: of the adapter's configuration.

    Returns:
        ``result``, ``detail`` (a refusal's words, or the first check that failed and how), ``routed`` layers, and the
        ``checks`` by name.
    """
    try:
        base = tiny_model(family)
        base.requires_grad_(False)  # as PEFT does it; Jamba computes differently then
        if not logits(base, tokens()).isfinite().all():
            return {"result": "not made", "detail": "the base model's logits are not finite"}
    except Exception as error:
        return {"result": "not made", "detail": f"{type(error).__name__}: {_line(error)}"}
    try:
        model = routed(copy.deepcopy(base), **{**variant_of(family).adapter, **changes})
    except ValueError as error:
        return {"result": "refused" if "\n" not in str(error) else "obscure", "detail": str(error)}
    except Exception as error:
        return {"result": "obscure", "detail": f"attaching: {type(error).__name__}: {_line(error)}"}
    number = len(layers(model))
    if default is not None and default.get("routed") == number and default["result"] == "right":
        return default
    found: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(base, model)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {_line(error)}"
    failed = {name: wrong for name, wrong in found.items() if wrong}
    return {
        "result": "wrong" if failed else "right",
        "detail": "; ".join(f"{name}: {wrong}" for name, wrong in failed.items()),
        "routed": number,
        "layers": getattr(base.config.get_text_config(), "num_hidden_layers", None),
        "checks": found,
    }


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def examine_all(
    families: Iterable[str], known: Found | None = None, default: Found | None = None, jobs: int = 1, **changes: Any
) -> Found:
    """`examine` each family in a fork of this process, which has imported what all of them need.

    Args:
        families: from `tiny.names`.
        known: what is found already, from an interrupted run.
        default: from a run without the changes.
        jobs: how many at once.
        changes: of the adapter's configuration.
    """
    found = dict(known or {})

    def one(family: str) -> None:
        found[family] = _forked(family, None if default is None else default[family], changes)
        print(json.dumps({"family": family, **found[family]}), flush=True)

    families = list(families)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [family for family in families if family not in found]))
    return {family: found[family] for family in families}


def by_type(found: Found, default_only: bool = False) -> dict[str, str]:
    """What becomes of each model type: the worst of its rows if one is bad, else the best.

    Args:
        found: from `examine_all`.
        default_only: without the rows of `VARIANTS` that change the adapter.
    """
    order = ("wrong", "obscure", "right", "refused", "not made")
    results: dict[str, str] = {}
    for name, of in found.items():
        variant = variant_of(name)
        if not (default_only and variant.adapter):
            known = results.get(variant.family, order[-1])
            results[variant.family] = min(known, of["result"], key=order.index)
    return results


def _forked(family: str, default: dict[str, Any] | None, changes: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_child, args=(sender, family, default, changes))
    worker.start()
    sender.close()
    try:
        if receiver.poll(WAIT_SECONDS):
            return receiver.recv()
        return {"result": "not made", "detail": f"took longer than {WAIT_SECONDS} s"}
    except EOFError:
        worker.join()
        return {"result": "obscure", "detail": f"the process ended with {worker.exitcode}"}
    finally:
        worker.kill()
        worker.join()


def _child(sender: Connection, family: str, default: dict[str, Any] | None, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        sender.send(examine(family, default, **changes))
