"""Commands about sharing: hub, push, pull, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import app, show, stderr


@app.command(
    epilog="Example: focus-hf hub --root ./hub --port 8888, then HF_ENDPOINT=http://127.0.0.1:8888 python ..."
)
def hub(
    root: Annotated[Path, typer.Option(help="Folder that holds the repositories.")] = Path("focus-hub"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8888,
) -> None:
    """Run a Hugging Face Hub on this machine."""
    from ..hub.server import serve

    stderr().print(f"Local Hub of {root}: set HF_ENDPOINT=http://{host}:{port}. Stop it with Ctrl-C.", soft_wrap=True)
    serve(root, host, port)


@app.command(epilog="Example: focus-hf push ./adapter me/llama-focus --dry-run")
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of the adapter.")],
    repo_id: Annotated[str, typer.Argument(help="Where to push it: org/name.")],
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a folder.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
    commit_message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the adapter.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, send nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Check an adapter, write its card and push both in one commit."""
    from ..hub import push_to_hub

    answer = push_to_hub(
        folder,
        repo_id,
        base_model=base_model,
        private=private,
        create_pr=create_pr,
        revision=revision,
        commit_message=commit_message,
        license=license,
        dry_run=dry_run,
    )
    if isinstance(answer, list):
        show({"repo_id": repo_id, "files": answer}, "\n".join(["Would push:", *answer]), as_json)
        return
    url = answer.pr_url or answer.commit_url
    show({"repo_id": repo_id, "commit": answer.oid, "url": url}, f"Pushed to {url}", as_json)


@app.command(epilog="Example: focus-hf pull me/llama-focus ./adapter")
def pull(
    repo_id: Annotated[str, typer.Argument(help="The adapter: org/name.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to put it; the cache by default.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Download an adapter, checked before and after."""
    from ..hub import pull as pull_adapter

    path = pull_adapter(repo_id, folder, revision=revision)
    show({"repo_id": repo_id, "folder": str(path)}, f"{repo_id} is in {path}", as_json)


@app.command(epilog="Example: focus-hf card --adapter ./adapter --repo-id me/llama-focus --write")
def card(
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter.")],
    repo_id: Annotated[str, typer.Option(help="Where it is, or will be, on the Hub.")] = "your-name/your-adapter",
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a folder.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write README.md into the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a README.md that somebody else wrote.")] = False,
) -> None:
    """Make the card of an adapter from its files."""
    from ..hub import FocusModelCard
    from ..hub.card import is_ours

    made = FocusModelCard.from_adapter(adapter, repo_id=repo_id, base_model=base_model)
    if not write:
        typer.echo(str(made))
        return
    path = adapter / "README.md"
    if not force and not is_ours(path):
        raise ValueError(f"{path} was not made by focus-hf; pass --force to replace it.")
    made.save(path)
    typer.echo(f"Wrote {path}")
