"""Push an adapter: checked first, then one commit on top of what was seen, or none."""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from ..card.card import FocusModelCard
from ..card.metadata import check_hub_id
from ..card.read import CARD, read_card
from ..escape import one_line
from ..files import write_atomically
from ..records.results import Results, load_results, save_results
from .bounds import Bounds
from .errors import LONGEST_REASON, HubError, hub_errors
from .files import adapter_files
from .merge_card import difference, merge_cards, missing_licence
from .place import Remote, look, place_for, stop_if_concerned
from .prepare import gather, name_base
from .remote import Hub

#: How often a push starts again because somebody else pushed something that does not concern it, and the longest wait
#: in between: random, so that those who push at once do not meet again.
_TRIES, _LONGEST_WAIT = 12, 4.0


@dataclass(frozen=True)
class PushPlan:
    """What a push would do.

    Args:
        repo_id: where to.
        files: everything that would be sent, with its size in bytes.
        card_changes: difference to the card on the Hub, as `diff -u` shows it; empty if there is none.
        notes: what a person should know.
    """

    repo_id: str
    files: dict[str, int]
    card_changes: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Pushed(CommitInfo):
    """The commit of a push.

    Args:
        unchanged: everything was there already: it is the commit that was found.
    """

    unchanged: bool = False


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
    force: bool = False,
    explorer: str | None = None,
    **card_options: Any,
) -> Pushed | PushPlan:
    """Push a Focus adapter and its card to the Hub.

    Everything is checked before anything is sent, and arrives in one commit on top of the version that was looked at.
    Content that is there already makes no commit. In a card that is on the Hub already, sections that this package
    wrote are refreshed and every word that a person wrote stays.

    Args:
        model_or_folder: a model with a Focus adapter, or the folder of one.
        repo_id: ``"org/name"``; created if it does not exist.
        adapter_name: which adapter, if the model has several.
        base_model: Hub id of the base model, needed if it was loaded from a folder.
        results: measured quality for the card; the folder's ``focus_results.json`` by default.
        private: create a private repository; one that exists must be private already.
        create_pr: open a pull request instead of committing to the branch.
        revision: branch to commit to; made from ``main`` if it does not exist.
        commit_message: of the commit.
        token: access token; the one of ``hf auth login`` by default.
        endpoint: address of the Hub; ``HF_ENDPOINT`` by default.
        dry_run: check everything and send nothing.
        force: replace a card on the Hub that somebody else wrote, and words in it that the folder's card lacks.
        explorer: Space on the Hub with the adapter's explorer page, for a link in the card.
        card_options: ``license``, ``language``, ``datasets``, ``metadata``, ``template``, see
            `FocusModelCard.from_adapter`.

    Returns:
        The commit; with ``dry_run`` what would be pushed.

    Raises:
        ValueError: the adapter, a name or the base model is not fit to be shared.
        HubError: the Hub refused or was not reached, or somebody has changed the same files meanwhile.
    """
    check_hub_id(repo_id, "repository")
    api = HfApi(endpoint=endpoint, token=token, library_name="focus_hf")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        gather(model_or_folder, folder, adapter_name, results)
        if explorer is not None:
            save_results(
                replace(load_results(folder) or Results(), explorer=check_hub_id(explorer, "explorer")), folder
            )
        base = name_base(folder, base_model, api)
        card = FocusModelCard.from_adapter(folder, repo_id=repo_id, base=base, endpoint=api.endpoint, **card_options)
        written = read_card(folder)
        before: Remote | None = None
        for number in range(_TRIES):
            if number:
                time.sleep(random.uniform(0.0, min(_LONGEST_WAIT, 0.2 * 2**number)))
            notes: list[str] = []
            try:
                with hub_errors(repo_id, api.endpoint):
                    remote = look(Hub(api), repo_id, revision)
            except HubError as error:
                if not dry_run:
                    raise
                remote, notes = Remote(), [f"Not compared with what is on the Hub: {error}"]
            if private and remote.is_public:
                raise ValueError(
                    f"{repo_id} exists and is public; private (--private) is for new repositories. Make it private on "
                    "its settings page, or push without it."
                )
            stop_if_concerned(before, remote, folder, repo_id)
            before = remote
            merged = merge_cards(card, written, remote.card, force, notes)
            notes += missing_licence(merged, base)
            write_atomically(folder / CARD, merged.encode())
            plan = _plan(repo_id, folder, remote, merged, notes)
            if dry_run:
                return plan
            with hub_errors(repo_id, api.endpoint):
                try:
                    return _commit(api, plan, folder, remote, revision, private, create_pr, commit_message)
                except HfHubHTTPError as error:
                    if error.response is None or error.response.status_code not in (409, 412):
                        raise
        raise HubError(f"{repo_id} changes all the time: push again when others have finished.")


def _plan(repo_id: str, folder: Path, remote: Remote, card: str, notes: list[str]) -> PushPlan:
    names = adapter_files(folder)
    if remote.card is not None and remote.card == card:
        names.remove(CARD)
    changes = "" if remote.card is None else difference(remote.card, card)
    return PushPlan(repo_id, {name: (folder / name).stat().st_size for name in names}, changes, list(notes))


def _commit(
    api: HfApi,
    plan: PushPlan,
    folder: Path,
    remote: Remote,
    revision: str | None,
    private: bool,
    create_pr: bool,
    message: str | None,
) -> Pushed:
    for note in plan.notes:
        warnings.warn(note, stacklevel=4)
    bounds = Bounds(api.endpoint)
    bounds.arrived(sum(plan.files.values()))
    additions = [CommitOperationAdd(name, folder / name) for name in plan.files]

    def send() -> CommitInfo:
        with place_for(api, plan.repo_id, remote, revision, private) as parent:
            for addition in additions:  # one by one: the library would send several in threads without our bounds
                api.preupload_lfs_files(plan.repo_id, [addition], revision=revision, create_pr=create_pr)
            return api.create_commit(
                plan.repo_id,
                additions,
                commit_message=message or "Push Focus adapter",
                create_pr=create_pr,
                revision=revision,
                parent_commit=parent,
            )

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = bounds.run(send)
    for warning in said:  # what the server says of the card
        text = one_line(" ".join(str(warning.message).split()), LONGEST_REASON)
        warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)
    url, pr_url = one_line(done.commit_url), done.pr_url and one_line(done.pr_url)
    return Pushed(
        url, done.commit_message, done.commit_description, one_line(done.oid), done._endpoint, pr_url,
        unchanged=done.pr_url is None and done.oid == remote.commit,
    )  # fmt: skip
