"""Before a push: what it sends, checked and in a folder of its own, and the repository and branch that it goes to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling

from ..card.metadata import check_hub_id
from ..card.read import CARD
from ..files import write_atomically
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, AdapterConfig, check_adapter, read_json
from ..records.group_report import GroupReport
from ..records.results import Results, save_results
from .errors import HubError
from .remote import Hub, adapter_files, card, copy_adapter, files, is_announced

#: Seconds to wait for what is good to know of a base model and not needed.
_SECONDS = 20.0


def gather(model_or_folder: Any, target: Path, adapter_name: str | None, results: Results | None) -> None:
    """Put the files of an adapter, checked, into a folder from which they are pushed."""
    if isinstance(model_or_folder, str | os.PathLike):
        check_adapter(model_or_folder)
        copy_adapter(Path(model_or_folder), target)
    else:
        from ..adapter.save import save_adapter

        save_adapter(model_or_folder, target, adapter_name)
    if results is not None:
        save_results(results, target)


def name_base(folder: Path, base_model: str | None, endpoint: str | None, token: str | None) -> ModelCardData | None:
    """Write the base model's Hub id where its name stands: a path on this machine must not leave it. Returns the
    metadata of its card; raises `ValueError` if it has no such id, or other shapes than the adapter."""
    config = check_adapter(folder)
    name = check_hub_id(base_model or config.base_model_name_or_path or "", "base model")
    base, its_config = base_card(name, endpoint, token)
    check_fits(config, name, its_config)
    values = read_json(folder / CONFIG_FILE)
    if values["base_model_name_or_path"] != name:
        values["base_model_name_or_path"] = name
        write_atomically(folder / CONFIG_FILE, json.dumps(values, indent=2, sort_keys=True).encode())
    if (report := GroupReport.load(folder)) is not None and report.base_model != name:
        replace(report, base_model=name).to_json(folder / GROUPS_FILE)
    return base


def base_card(
    name: str, endpoint: str | None = None, token: str | None = None
) -> tuple[ModelCardData | None, dict[str, Any]]:
    """The metadata of a base model's card and its ``config.json``, as far as it is on the Hub, which is reached, and
    ours to see."""
    hub = Hub(endpoint, token, _SECONDS)
    try:
        with hub.errors(name):
            model = hub.model(name)
            config = read_json(hub.fetch(model, "config.json")) if "config.json" in files(model) else {}
    except (HubError, ValueError):
        return None, {}
    return card(model), config if isinstance(config, dict) else {}


def check_fits(config: AdapterConfig, name: str, base: dict[str, Any]) -> None:
    """Raise `ValueError` if an adapter's shapes are not those of its base model, as far as its ``config.json`` says
    them."""
    text = base["text_config"] if isinstance(base.get("text_config"), dict) else base

    def stated(*names: str) -> int | None:
        return next((text[name] for name in names if isinstance(text.get(name), int)), None)

    width = stated("attention_hidden_size", "hidden_size", "n_embd", "d_model")  # the first is Zamba's: two in one
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"The adapter was made for a model of hidden_size {config.hidden_size}, but {name} has {width}: name the "
            "base model it was trained on."
        )
    layers = stated("num_hidden_layers", "n_layer", "num_layers")
    if layers is not None and config.layers and max(config.layers) >= layers:
        raise ValueError(
            f"The adapter routes layer {max(config.layers)}, but {name} has {layers} layers: name the base model it "
            "was trained on."
        )


@dataclass(frozen=True)
class Remote:
    """A repository as it is now.

    Args:
        commit: of the branch, or of ``main`` where the branch does not exist yet; ``None`` without a repository.
        card: its README.md.
        files: by name.
        is_public: everybody may see it.
        has_branch: the branch exists.
    """

    commit: str | None = None
    card: str | None = None
    files: Mapping[str, RepoSibling] = field(default_factory=dict)
    is_public: bool = False
    has_branch: bool = True


def look(hub: Hub, repo_id: str, revision: str | None) -> Remote:
    """What there is now; of a branch to be made, what it will start from."""
    try:
        model = hub.model(repo_id, revision)
    except RevisionNotFoundError:
        return replace(look(hub, repo_id, None), has_branch=False) if revision else Remote()
    except RepositoryNotFoundError as error:
        if type(error) is not RepositoryNotFoundError:  # gated: it is there
            raise
        return Remote()
    found = files(model)
    written = hub.fetch(model, CARD).read_text("utf-8", "replace") if CARD in found else None
    return Remote(model.sha, written, found, is_public=not model.private)


def stop_if_concerned(before: Remote | None, now: Remote, folder: Path, repo_id: str) -> None:
    """A push in between is no matter unless it made something else of a file that we send; cards are merged."""
    if before is None:
        return
    for name in adapter_files(folder):
        ours = name == CARD or (name in now.files and is_announced(folder / name, now.files[name]))
        if before.files.get(name) != now.files.get(name) and not ours:
            raise HubError(f"Somebody pushed {name} to {repo_id} meanwhile: look at the new version, then push again.")


@contextmanager
def place_for(api: HfApi, repo_id: str, remote: Remote, revision: str | None, private: bool) -> Iterator[str]:
    """The commit that a push follows; a repository or branch made for it is removed again if the push is refused."""
    made: Callable[[], object] | None = None
    if remote.commit is None:
        try:
            api.create_repo(repo_id, private=private)
            made = partial(api.delete_repo, repo_id)
        except HfHubHTTPError as error:
            if error.response.status_code != 409:  # somebody else has just made it
                raise
    try:
        parent = remote.commit or str(api.model_info(repo_id).sha)
        if revision is not None and (made or not remote.has_branch):
            api.create_branch(repo_id, branch=revision, revision=parent)
            made = made or partial(api.delete_branch, repo_id, branch=revision)
        yield parent
    except (HfHubHTTPError, ValueError):  # a broken connection is no refusal: what was sent may have arrived
        if made and api.model_info(repo_id, revision=revision).sha == parent:  # nobody else has used it
            made()
        raise
