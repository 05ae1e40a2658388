"""Commands about sharing: hub, push, pull, card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..escape import one_line
from ..files import write_atomically
from ..output import say
from .app import LONGEST_LINE, app, show, stderr
from .flags import AsJson, License, NamedBase, named_values

if TYPE_CHECKING:
    from ..hub import PushPlan

_METADATA = Annotated[
    list[str] | None, typer.Option(help="Metadata of the card, as name=value (YAML); may be repeated.")
]
_TEMPLATE = Annotated[Path | None, typer.Option(help="A Jinja template of your own for the card.", exists=True)]


@app.command(epilog="Example: focus-hf hub --root ./hub --port 8888")
def hub(
    root: Annotated[Path, typer.Option(help="Folder that holds the repositories.")] = Path("focus-hub"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8888,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="A user's token, as user:token or user:token:read; may be repeated. Without, there is one user, "
            "demo, with a token of the Hub's own making."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which it may be asked, besides localhost and --host; may be repeated."),
    ] = None,
) -> None:
    """Run a Hugging Face Hub on this machine; its pages are for the browser, too."""
    from ..local_hub import TOKEN_FILE, User, owner_token, serve

    users = None
    if token:
        users = {}
        for entry in token:
            name, _, rest = entry.partition(":")
            secret, _, role = rest.partition(":")
            if not name or not secret:
                raise ValueError("--token takes user:token or user:token:read.")
            if role not in ("", "read", "write"):
                raise ValueError(f"--token: a token is for read or write, got {role!r}.")
            users[secret] = User(name, "read" if role == "read" else "write")
    settings = [f"HF_ENDPOINT=http://{f'[{host}]' if ':' in host else host}:{port}"]
    if users is None:
        settings += [f"HF_TOKEN={owner_token(root)} (or HF_TOKEN_PATH={root / TOKEN_FILE})"]
    say(stderr(), f"Local Hub of {root}: set {' and '.join(settings)}. Stop it with Ctrl-C.")
    serve(root, host, port, users=users, allow_hosts=allow_host or ())


@app.command(epilog="Example: focus-hf push ./adapter me/llama-focus --dry-run")
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of the adapter.")],
    repo_id: Annotated[str, typer.Argument(help="Where to push it: org/name.")],
    base_model: NamedBase = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
    commit_message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    license: License = None,
    explorer: Annotated[str | None, typer.Option(help="Space with its explorer page: org/name.")] = None,
    metadata: _METADATA = None,
    template: _TEMPLATE = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a card that somebody else wrote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, send nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check an adapter, write its card and push both in one commit."""
    from ..hub import PushPlan, push_to_hub

    answer = push_to_hub(
        folder,
        repo_id,
        base_model=base_model,
        private=private,
        create_pr=create_pr,
        revision=revision,
        commit_message=commit_message,
        license=license,
        explorer=explorer,
        metadata=named_values("--metadata", metadata or []),
        template=template,
        force=force,
        dry_run=dry_run,
    )
    if isinstance(answer, PushPlan):
        show({**asdict(answer), "files": list(answer.files), "sizes": answer.files}, _planned(answer), as_json)
        return
    url = answer.pr_url or answer.commit_url
    text = f"Nothing to push: {repo_id} has all of it at {url}" if answer.unchanged else f"Pushed to {url}"
    show({"repo_id": repo_id, "commit": answer.oid, "url": url, "unchanged": answer.unchanged}, text, as_json)


def _planned(plan: PushPlan) -> str:
    lines = [f"Would push to {plan.repo_id}:", *(f"  {name} ({size:,} bytes)" for name, size in plan.files.items())]
    lines += [f"Note: {note}" for note in plan.notes]
    lines += plan.card_changes.split("\n") if plan.card_changes else []
    return "\n".join(one_line(line, limit=LONGEST_LINE) for line in lines)  # a stranger's words among them


@app.command(epilog="Example: focus-hf pull me/llama-focus ./adapter")
def pull(
    repo_id: Annotated[str, typer.Argument(help="The adapter: org/name.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to put it; the cache by default.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download an adapter, checked before and after."""
    from ..hub import pull as pull_adapter

    path = pull_adapter(repo_id, folder, revision=revision)
    show({"repo_id": repo_id, "folder": str(path)}, f"{repo_id} is in {path}", as_json)


@app.command(epilog="Example: focus-hf card --adapter ./adapter --repo-id me/llama-focus --write")
def card(
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter.")],
    repo_id: Annotated[str, typer.Option(help="Where it is, or will be, on the Hub.")] = "your-name/your-adapter",
    base_model: NamedBase = None,
    license: License = None,
    metadata: _METADATA = None,
    template: _TEMPLATE = None,
    write: Annotated[bool, typer.Option("--write", help="Write README.md into the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace README.md, with what a person wrote in it.")] = False,
) -> None:
    """Make the card of an adapter from its files; what a person wrote in README.md stays."""
    from ..card import FocusModelCard
    from ..card.figures import dial_figure
    from ..card.read import CARD, read_card
    from ..hub.prepare import base_card
    from ..records import load_results, read_config

    name = base_model or read_config(adapter).base_model_name_or_path or ""
    base = base_card(name)[0] if name and not Path(name).is_dir() else None
    if write and (results := load_results(adapter)) is not None:
        dial_figure(results, adapter)
    made = FocusModelCard.from_adapter(
        adapter,
        repo_id=repo_id,
        base_model=base_model,
        base=base,
        license=license,
        metadata=named_values("--metadata", metadata or []),
        template=template,
    )
    path, old = adapter / CARD, read_card(adapter)
    if old is not None and not force:
        made = made.refreshing(old)
    if not write:
        typer.echo(str(made))
        return
    write_atomically(path, str(made).encode())
    if not made.metadata.get("license"):
        say(stderr(), "Note: the card states no licence; give one with --license.")
    typer.echo(f"Wrote {path}")
