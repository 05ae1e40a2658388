"""What a push sends: an adapter's files in a folder of their own, checked, with the base model's name on the Hub."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..card.metadata import check_hub_id
from ..files import write_atomically
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, check_adapter, read_json
from ..records.base_model import BaseFacts, check_fits
from ..records.group_report import GroupReport
from ..records.results import Results, save_results
from .base import base_facts
from .files import adapter_files


def gather(model_or_folder: Any, target: Path, adapter_name: str | None, results: Results | None) -> None:
    """Put the files of an adapter, checked, into a folder from which they are pushed."""
    if isinstance(model_or_folder, str | os.PathLike):
        source = Path(model_or_folder)
        check_adapter(source)
        for name in adapter_files(source):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    else:
        from ..adapter.save import save_adapter

        save_adapter(model_or_folder, target, adapter_name)
    if results is not None:
        save_results(results, target)


def name_base(folder: Path, base_model: str | None, api: HfApi) -> BaseFacts | None:
    """Write the base model's Hub id where its name stands: a path on this machine must not leave it."""
    config = check_adapter(folder)
    name = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
    base = base_facts(name, api)
    if base is not None:
        check_fits(config, base)
    values = read_json(folder / CONFIG_FILE)
    if values["base_model_name_or_path"] != name:
        values["base_model_name_or_path"] = name
        write_atomically(folder / CONFIG_FILE, (json.dumps(values, indent=2, sort_keys=True)).encode())
    if (folder / GROUPS_FILE).is_file():
        report = GroupReport.from_json(folder / GROUPS_FILE)
        if report.base_model != name:
            replace(report, base_model=name).to_json(folder / GROUPS_FILE)
    return base
