"""Push an adapter: checked first, then one commit on top of what was seen, or none."""

from __future__ import annotations

import difflib
import random
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError

from ..card.card import FocusModelCard
from ..card.metadata import check_hub_id
from ..card.read import CARD, is_ours, own_words, read_card, read_metadata
from ..card.sections import CardText
from ..escape import one_line
from ..files import write_atomically
from ..front_matter import card_metadata
from ..records.results import Results, load_results, save_results
from .errors import LONGEST_REASON, HubError
from .prepare import Remote, gather, look, name_base, place_for, stop_if_concerned
from .remote import Hub, adapter_files

#: How often a push starts again because somebody else pushed something that does not concern it, and the longest wait
#: in between: random, so that those who push at once do not meet again.
_TRIES, _LONGEST_WAIT = 12, 4.0

#: Lines of a card that are compared with another; the time it takes grows with their square.
_MOST_LINES = 5_000


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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        gather(model_or_folder, folder, adapter_name, results)
        if explorer is not None:
            told = replace(load_results(folder) or Results(), explorer=check_hub_id(explorer, "explorer"))
            save_results(told, folder)
        base = name_base(folder, base_model, endpoint, token)
        card = FocusModelCard.from_adapter(folder, repo_id=repo_id, base=base, endpoint=endpoint, **card_options)
        written = read_card(folder)
        before: Remote | None = None
        for number in range(_TRIES):
            if number:
                time.sleep(random.uniform(0.0, min(_LONGEST_WAIT, 0.2 * 2**number)))
            hub, notes = Hub(endpoint, token), list[str]()
            try:
                with hub.errors(repo_id):
                    remote = look(hub, repo_id, revision)
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
            merged = _merge_cards(card, written, None if force else remote.card, notes)
            if not read_metadata(merged).get("license"):
                why = "model was not found on the Hub" if base is None else "model's page does not state one"
                notes.append(f"The card states no licence: the base {why}. Give one with license (--license).")
            write_atomically(folder / CARD, merged.encode())
            sizes = {name: (folder / name).stat().st_size for name in adapter_files(folder)}
            if remote.card == merged:
                del sizes[CARD]
            plan = PushPlan(repo_id, sizes, _difference(remote.card, merged), notes)
            if dry_run:
                return plan
            for note in notes:
                warnings.warn(note, stacklevel=2)
            with hub.errors(repo_id):
                try:
                    return _commit(hub, plan, folder, remote, private, revision, create_pr, commit_message)
                except HfHubHTTPError as error:
                    if error.response.status_code not in (409, 412):
                        raise
        raise HubError(f"{repo_id} changes all the time: push again when others have finished.")


def _merge_cards(made: FocusModelCard, written: str | None, remote: str | None, notes: list[str]) -> str:
    """The card to push, from the one made now, the folder's and the Hub's; nobody's words are lost: `ValueError` if
    both hold words that the other lacks, or one cannot be read."""
    for card, where in ((remote, "on the Hub"), (written, "in the folder")):
        try:
            card_metadata(card or "")
        except ValueError as error:
            raise ValueError(
                f"The README.md {where} has metadata that cannot be read ({one_line(str(error))}): mend it there, or "
                "replace the one on the Hub with force (--force)."
            ) from None
    older = [card for card in (remote, written) if card is not None]
    if len({own_words(card) for card in older} - {""}) > 1:
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


def _difference(old: str | None, new: str) -> str:
    """What becomes of a card, as ``diff -u`` shows it; of one that is very long, how long it was and is."""
    if old is None:
        return ""
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > _MOST_LINES:
        return f"(a card of {len(before):,} lines becomes one of {len(after):,})"
    return "\n".join(difflib.unified_diff(before, after, "card on the Hub", "card to push", lineterm=""))


def _commit(
    hub: Hub,
    plan: PushPlan,
    folder: Path,
    remote: Remote,
    private: bool,
    revision: str | None,
    create_pr: bool,
    message: str | None,
) -> Pushed:
    api, additions = hub.api, [CommitOperationAdd(name, folder / name) for name in plan.files]
    hub.bounds.arrived(sum(plan.files.values()))

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
        done = hub.bounds.run(send)
    for warning in said:  # what the server says of the card
        text = one_line(" ".join(str(warning.message).split()), LONGEST_REASON)
        warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)
    url, pr_url = one_line(done.commit_url), done.pr_url and one_line(done.pr_url)
    return Pushed(
        url, done.commit_message, done.commit_description, one_line(done.oid), done._endpoint, pr_url,
        unchanged=done.pr_url is None and done.oid == remote.commit,
    )  # fmt: skip
