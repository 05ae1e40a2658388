"""Push an adapter: checked first, then one commit."""

from __future__ import annotations

import copy
import fnmatch
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from .adapter_files import ADAPTER_FILES, check_adapter, save_adapter, write_config
from .card import FocusModelCard, check_hub_id, is_ours
from .errors import hub_errors
from .results import Results, save_results

CARD = "README.md"


def push_to_hub(
    model_or_folder: Any,
    repo_id: str,
    *,
    adapter_name: str | None = None,
    base_model: str | None = None,
    results: Results | None = None,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    dry_run: bool = False,
    **card_metadata: Any,
) -> CommitInfo | list[str]:
    """Push a Focus adapter and its card to the Hub.

    Everything is checked before anything is sent, and arrives in one commit. Content that is there already makes no
    commit. A card that somebody wrote by hand is left alone.

    Args:
        model_or_folder: a model with a Focus adapter, or the folder of one.
        repo_id: ``"org/name"``; created if it does not exist.
        adapter_name: which adapter, if the model has several.
        base_model: Hub id of the base model, needed if it was loaded from a folder.
        results: measured quality for the card; the folder's ``focus_results.json`` by default.
        private: create a private repository.
        create_pr: open a pull request instead of committing to the branch.
        revision: branch to commit to.
        commit_message: of the commit.
        token: access token; the one of ``hf auth login`` by default.
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.
        dry_run: check everything and send nothing.
        card_metadata: ``license``, ``language``, ``datasets``, see `FocusModelCard.from_adapter`.

    Returns:
        The commit; with ``dry_run`` the files that would be pushed.

    Raises:
        ValueError: the adapter, a name or the base model is not fit to be shared.
        HubError: the Hub refused or was not reached.
    """
    check_hub_id(repo_id, "repository")
    api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if isinstance(model_or_folder, str | os.PathLike):
            _copy_adapter(Path(model_or_folder), folder)
        else:
            save_adapter(model_or_folder, folder, adapter_name)
        if results is not None:
            save_results(results, folder)
        _name_base(folder, base_model)
        FocusModelCard.from_adapter(folder, repo_id=repo_id, **card_metadata).save(folder / CARD)

        files = _adapter_files(folder)
        if dry_run:
            return files
        with hub_errors(repo_id, api.endpoint):
            if not _card_is_ours(api, repo_id, revision):
                warnings.warn(f"{repo_id} has a card written by hand; it is left as it is.", stacklevel=2)
                files.remove(CARD)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return api.create_commit(
                repo_id,
                [CommitOperationAdd(name, folder / name) for name in files],
                commit_message=commit_message or "Push Focus adapter",
                create_pr=create_pr,
                revision=revision,
            )


def _copy_adapter(source: Path, target: Path) -> None:
    """Copy the files that belong to an adapter, after checking all that are there."""
    check_adapter(source)
    for name in _adapter_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _name_base(folder: Path, base_model: str | None) -> None:
    """Write the base model's Hub id into the configuration: a path on this machine must not leave it."""
    config = copy.copy(check_adapter(folder))
    config.base_model_name_or_path = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
    write_config(folder, config)


def _adapter_files(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in ADAPTER_FILES))


def _card_is_ours(api: HfApi, repo_id: str, revision: str | None) -> bool:
    """Whether the card on the Hub may be replaced: there is none, or this package made it."""
    try:
        path = api.hf_hub_download(repo_id, CARD, revision=revision)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return True
    return is_ours(Path(path))
