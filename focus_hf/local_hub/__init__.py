"""A Hugging Face Hub on this machine, for demos and tests: no account, no network.

The real `huggingface_hub` client talks to it through ``HF_ENDPOINT`` or ``HfApi(endpoint=...)``, a browser through its
pages. Repositories are real bare git repositories. It needs the extra ``focus-hf[hub]``.

What it does not have: likes, discussions that are no pull requests, requests for access to gated files (their owner
grants it), and Xet storage. Files up to 64 MB are committed directly, so every client works as it is; for
larger ones set ``HF_HUB_DISABLE_XET=1`` before starting Python, and they go through Git LFS.
"""

from .app import LocalHub, create_app, serve
from .hub import LFS_THRESHOLD, TOKEN_FILE, User, owner_token

__all__ = ["LFS_THRESHOLD", "TOKEN_FILE", "LocalHub", "User", "create_app", "owner_token", "serve"]
