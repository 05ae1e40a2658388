"""Serve a model with a Focus adapter: `transformers serve`, which speaks the OpenAI protocol.

    python examples/serve.py --adapter org/llama-focus --port 8000 --device cuda:0
    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "llama-focus", "prompt": "In the beginning", "max_tokens": 20}'

Plain `transformers serve` does not know the adapter type, and wants model, tokenizer and adapter under one name.
This script imports focus_hf, links the base model's files and the adapter's into a temporary folder, and starts the
stock server on it; flags that it does not know itself go to that server. Needs `pip install
"transformers[serving]"`.

With --continuous-batching the server answers all requests together. Bound its memory with --cb-num-blocks and
--cb-max-batch-tokens; without them it takes most of what is free.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.cli.transformers import app

import focus_hf  # noqa: F401  registers the adapter type
from focus_hf.hub import adapter_folder
from focus_hf.records import read_config

#: Files of a base model: weights, configuration, tokenizer, chat template.
BASE_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]


def make_folder(adapter: str, base: str | None, folder: Path) -> None:
    """What the server can load by one name: links to the base model's files and to the adapter's."""
    source = adapter_folder(adapter)
    config = read_config(source)
    name = base or config.base_model_name_or_path
    if name is None:
        raise SystemExit(f"{adapter} does not name its base model; name it with --base")
    if not Path(name).is_dir():
        name = snapshot_download(name, revision=None if base else config.revision, allow_patterns=BASE_FILES)
    folder.mkdir()
    for file in Path(name).resolve().iterdir():
        if any(file.match(pattern) for pattern in BASE_FILES) and not file.name.startswith("adapter_"):
            (folder / file.name).symlink_to(file)
    for file_name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file_name).symlink_to((source / file_name).resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="the adapter: a folder or a Hub id")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        name = Path(args.adapter).resolve().name
        make_folder(args.adapter, args.base, Path(scratch, name))
        os.chdir(scratch)  # so that clients ask for the adapter's plain name
        sys.argv = ["transformers", "serve", name, *rest]
        app()


if __name__ == "__main__":
    main()
