"""The command ``focus-hf``: one thin layer over the package's functions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="focus-hf",
    help="Focus adapters: sparse long-range attention for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


@app.command(epilog="Example: focus-hf demo --base ./my-model --text notes.txt --out demo-output")
def demo(
    base: Annotated[str | None, typer.Option(help="Causal language model: a folder or a Hub id.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to train on.", exists=True, dir_okay=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything it writes.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(help="Training steps of the centroids.", min=1)] = 120,
) -> None:
    """Train, push to a Hub on this machine, load back and generate: the whole story, offline."""
    from .demo import run_demo

    run_demo(base, text, out, steps)


@app.command(
    epilog="Example: focus-hf hub --root ./hub --port 8888, then HF_ENDPOINT=http://127.0.0.1:8888 python ..."
)
def hub(
    root: Annotated[Path, typer.Option(help="Folder that holds the repositories.")] = Path("focus-hub"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8888,
) -> None:
    """Run a Hugging Face Hub on this machine."""
    from .hub.server import serve

    _stderr().print(f"Local Hub of {root}: set HF_ENDPOINT=http://{host}:{port}. Stop it with Ctrl-C.", soft_wrap=True)
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
    from .hub import push_to_hub

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
        _print({"repo_id": repo_id, "files": answer}, "\n".join(["Would push:", *answer]), as_json)
        return
    url = answer.pr_url or answer.commit_url
    _print({"repo_id": repo_id, "commit": answer.oid, "url": url}, f"Pushed to {url}", as_json)


@app.command(epilog="Example: focus-hf pull me/llama-focus ./adapter")
def pull(
    repo_id: Annotated[str, typer.Argument(help="The adapter: org/name.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to put it; the cache by default.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Download an adapter, checked before and after."""
    from .hub import pull as pull_adapter

    path = pull_adapter(repo_id, folder, revision=revision)
    _print({"repo_id": repo_id, "folder": str(path)}, f"{repo_id} is in {path}", as_json)


@app.command(epilog="Example: focus-hf card --adapter ./adapter --repo-id me/llama-focus --write")
def card(
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter.")],
    repo_id: Annotated[str, typer.Option(help="Where it is, or will be, on the Hub.")] = "your-name/your-adapter",
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a folder.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write README.md into the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a README.md that somebody else wrote.")] = False,
) -> None:
    """Make the card of an adapter from its files."""
    from .hub import FocusModelCard
    from .hub.card import GENERATED

    made = FocusModelCard.from_adapter(adapter, repo_id=repo_id, base_model=base_model)
    if not write:
        typer.echo(str(made))
        return
    path = adapter / "README.md"
    if path.exists() and not force and GENERATED not in path.read_text(encoding="utf-8"):
        raise ValueError(f"{path} was not made by focus-hf; pass --force to replace it.")
    made.save(path)
    typer.echo(f"Wrote {path}")


@app.command(
    epilog="Example: focus-hf bench --what attention,decode --lengths 2048,8192 --top-k 1,2 --json results.json"
)
def bench(
    what: Annotated[str, typer.Option(help="Of attention, decode, model, memory, training.")] = "attention,decode",
    device: Annotated[str, typer.Option(help="Where: cpu, cuda, cuda:1 ...")] = "cpu",
    lengths: Annotated[str, typer.Option(help="Tokens, several with commas.")] = "1024,2048,4096,8192",
    num_groups: Annotated[str, typer.Option(help="Groups per layer (K), several with commas.")] = "8",
    top_k: Annotated[str, typer.Option(help="Groups per token (k), several with commas.")] = "1",
    local_window: Annotated[str, typer.Option(help="Local window (w), several with commas.")] = "128",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; several with commas.")] = "float32",
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.", min=1)] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch on CPU.", min=1)] = None,
    kernel: Annotated[str, typer.Option(help="Attention backend, as `focus-hf info` lists them.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Model for `model`: a folder or a Hub id.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each setting, at least.", min=0.1)] = 5.0,
    json_out: Annotated[str | None, typer.Option("--json", help="Write JSON: a file, or - for the screen.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw ratios against lengths (PNG).")] = None,
) -> None:
    """Measure speed and memory against the best dense attention, in one interleaved run."""
    from .bench import grid
    from .bench.run import KINDS, run_bench

    kinds = [kind for kind in what.split(",") if kind]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--what must be of {', '.join(KINDS)}, got {unknown[0]!r}.")
    fixed = {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim, "device": device, "kernel": kernel}
    settings = list(
        grid(
            _numbers("--lengths", lengths),
            _numbers("--num-groups", num_groups),
            _numbers("--top-k", top_k),
            _numbers("--local-window", local_window),
            dtype.split(","),
            **fixed,
        )
    )
    run_bench(
        kinds,
        settings,
        base=base,
        threads=threads,
        seconds=seconds,
        json_out=json_out,
        markdown=markdown,
        plot=plot,
    )


@app.command(epilog="Example: focus-hf info")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Versions, devices, and the attention kernels found on this machine, with the one in use."""
    from .bench import environment

    facts = environment()
    lines = [f"{name} {version}" for name, version in facts["packages"].items()]
    lines += [f"{d['device']}: {d['name']}, uses {d['kernel']}" for d in facts["devices"]]
    lines += [f"kernel {name}: {state}" for name, state in facts["kernels"].items()]
    _print(facts, "\n".join([f"Python {facts['python']}, {facts['platform']}", *lines]), as_json)


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas between them, got {text!r}.") from None


#: Packages that a command may find missing, and the extra that brings them.
_EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "dulwich": "hub",
    "matplotlib": "viz",
    "starlette": "hub",
    "uvicorn": "hub",
}

#: Commands whose --json takes a file; without one they print.
_JSON_FILES = ("bench",)


def _json_to_screen(arguments: list[str]) -> list[str]:
    """Give ``--json`` its value ``-`` where it stands alone."""
    if not arguments or arguments[0] not in _JSON_FILES:
        return arguments
    result = []
    for position, argument in enumerate(arguments):
        result.append(argument)
        following = arguments[position + 1 : position + 2]
        if argument == "--json" and (not following or following[0].startswith("--")):
            result.append("-")
    return result


def _print(values: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(values) if as_json else text)


def _fail(message: str) -> None:
    _stderr().print(f"focus-hf: {' '.join(message.split())}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


def _stderr() -> Console:
    return Console(stderr=True)


def main() -> None:
    """Entry point. Exit code 0; 1 for what went wrong, told in one line; 2 for a wrong command line."""
    try:
        app(_json_to_screen(sys.argv[1:]))
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        _fail(f"This needs {package}: pip install 'focus-hf[{_EXTRAS[package]}]'")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
