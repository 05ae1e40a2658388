"""Push an adapter: checked first, then one commit on top of what was seen, or none."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ..card.card import FocusModelCard
from ..card.metadata import check_hub_id
from ..card.read import CARD, is_ours, own_words, read_card, read_metadata
from ..card.sections import CardText
from ..escape import one_line
from ..files import write_atomically
from ..front_matter import card_metadata
from ..records.adapter_files import CONFIG_FILE, GROUPS_FILE, check_adapter, read_json
from ..records.base_model import BaseFacts, check_fits
from ..records.group_report import GroupReport
from ..records.results import Results, load_results, save_results
from .base import base_facts
from .benchmarks import write_benchmark_results
from .errors import HubError, hub_errors, sense_errors
from .files import LARGEST, adapter_files
from .remote import HubReader, RemoteFile
from .transfer import Patience, bounded_answers

#: How often a push starts again because somebody else pushed something that does not concern it.
_TRIES = 3


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


@dataclass(frozen=True)
class _Remote:
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
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    is_public: bool = False
    has_branch: bool = True


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
        _gather(model_or_folder, folder, adapter_name, results)
        if explorer is not None:
            save_results(
                replace(load_results(folder) or Results(), explorer=check_hub_id(explorer, "explorer")), folder
            )
        base = _name_base(folder, base_model, api)
        card = FocusModelCard.from_adapter(folder, repo_id=repo_id, base=base, endpoint=api.endpoint, **card_options)
        written = read_card(folder)
        with hub_errors(repo_id, api.endpoint):
            write_benchmark_results(load_results(folder), folder, api)
        before: _Remote | None = None
        for _ in range(_TRIES):
            notes: list[str] = []
            try:
                with hub_errors(repo_id, api.endpoint):
                    remote = _look(HubReader(api), repo_id, revision)
            except HubError as error:
                if not dry_run:
                    raise
                remote, notes = _Remote(), [f"Not compared with what is on the Hub: {error}"]
            if private and remote.is_public:
                raise ValueError(
                    f"{repo_id} exists and is public; private (--private) is for new repositories. Make it private on "
                    "its settings page, or push without it."
                )
            _stop_if_concerned(before, remote, folder, repo_id)
            before = remote
            merged = _merge_cards(card, written, remote.card, force, notes)
            notes += _licence(merged, base)
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


def _gather(model_or_folder: Any, target: Path, adapter_name: str | None, results: Results | None) -> None:
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


def _name_base(folder: Path, base_model: str | None, api: HfApi) -> BaseFacts | None:
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


def _licence(card: str, base: BaseFacts | None) -> list[str]:
    if read_metadata(card).get("license"):
        return []
    reason = "the base model's page does not state one" if base else "the base model was not found on the Hub"
    return [f"The card states no licence: {reason}. Give one with license (--license)."]


def _look(reader: HubReader, repo_id: str, revision: str | None) -> _Remote:
    """What there is now; of a branch to be made, what it will start from."""
    try:
        model = reader.model(repo_id, revision)
    except RevisionNotFoundError:
        return replace(_look(reader, repo_id, None), has_branch=False) if revision else _Remote()
    except RepositoryNotFoundError as error:
        if type(error) is not RepositoryNotFoundError:  # gated: it is there
            raise
        return _Remote()
    card = reader.text(reader.url(model, CARD), LARGEST[CARD]) if CARD in model.files else None
    return _Remote(model.commit, card, model.files, is_public=not model.private)


def _stop_if_concerned(before: _Remote | None, now: _Remote, folder: Path, repo_id: str) -> None:
    """A push in between is no matter unless it changed a file that we send; cards are merged."""
    if before is None:
        return
    names = before.files.keys() | now.files.keys()
    changed = {name for name in names if before.files.get(name) != now.files.get(name)}
    if both := sorted(changed & (set(adapter_files(folder)) - {CARD})):
        raise HubError(f"Somebody pushed {both[0]} to {repo_id} meanwhile: look at the new version, then push again.")


def _merge_cards(made: FocusModelCard, written: str | None, remote: str | None, force: bool, notes: list[str]) -> str:
    """The card to push, from the one made now, the folder's and the Hub's; nobody's words are lost.

    Raises:
        ValueError: the folder's card and the Hub's both hold words that the other lacks, or one cannot be read.
    """
    remote = None if force else remote
    for card, where in ((remote, "on the Hub"), (written, "in the folder")):
        try:
            card_metadata(card or "")
        except ValueError as error:
            raise ValueError(
                f"The README.md {where} has metadata that cannot be read ({one_line(str(error))}): mend it there, or "
                "replace the one on the Hub with force (--force)."
            ) from None
    older = [card for card in (remote, written) if card is not None]
    words = {own for card in older if (own := own_words(card))}
    if len(words) > 1:
        raise ValueError(
            "The card on the Hub has words that the folder's README.md lacks, and the other way round: bring them "
            "together in the folder's and pass force (--force), which replaces the one on the Hub."
        )
    if any(own_words(card) and not is_ours(card) for card in older):
        notes.append("The card was written by hand: its words stay, ours follow them (--force replaces it).")
    merged = made.refreshing(*older)
    if edited := CardText.parse(merged.text).edited:
        notes.append(f"Changed by hand and left as they are: sections {', '.join(edited)} of the card.")
    return str(merged)


def _plan(repo_id: str, folder: Path, remote: _Remote, card: str, notes: list[str]) -> PushPlan:
    names = adapter_files(folder)
    if remote.card is not None and remote.card == card:
        names.remove(CARD)
    changes = "" if remote.card is None else _difference(remote.card, card)
    return PushPlan(repo_id, {name: (folder / name).stat().st_size for name in names}, changes, list(notes))


#: Lines of a card that are compared with another; the time it takes grows with their square.
_MOST_LINES = 5_000


def _difference(old: str, new: str) -> str:
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > _MOST_LINES:
        return f"(a card of {len(before):,} lines becomes one of {len(after):,})"
    return "\n".join(difflib.unified_diff(before, after, "card on the Hub", "card to push", lineterm=""))


def _commit(
    api: HfApi,
    plan: PushPlan,
    folder: Path,
    remote: _Remote,
    revision: str | None,
    private: bool,
    create_pr: bool,
    message: str | None,
) -> Pushed:
    for note in plan.notes:
        warnings.warn(note, stacklevel=4)
    patience = Patience()
    patience.arrived(sum(plan.files.values()))

    def send() -> CommitInfo:
        with _place_for(api, plan.repo_id, remote, revision, private) as parent:
            return api.create_commit(
                plan.repo_id,
                [CommitOperationAdd(name, folder / name) for name in plan.files],
                commit_message=message or "Push Focus adapter",
                create_pr=create_pr,
                revision=revision,
                parent_commit=parent,
            )

    with sense_errors(api.endpoint), bounded_answers():
        done = patience.wait_for(send, api.endpoint)
    return Pushed(
        done.commit_url, done.commit_message, done.commit_description, done.oid, done._endpoint, done.pr_url,
        unchanged=done.pr_url is None and done.oid == remote.commit,
    )  # fmt: skip


@contextmanager
def _place_for(api: HfApi, repo_id: str, remote: _Remote, revision: str | None, private: bool) -> Iterator[str]:
    """The commit that a push follows; a repository or branch made for it is removed again if the push is refused."""
    made: Callable[[], object] | None = None
    if remote.commit is None and _make_repository(api, repo_id, private):
        made = partial(api.delete_repo, repo_id)
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


def _make_repository(api: HfApi, repo_id: str, private: bool) -> bool:
    """Whether there was none."""
    try:
        api.create_repo(repo_id, private=private)
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code != 409:
            raise
        return False
    return True
