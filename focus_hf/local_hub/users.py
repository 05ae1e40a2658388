"""Who may use the Hub: names and roles."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class User:
    """What one token stands for.

    Args:
        name: of the user, and of the namespace that is hers.
        role: a "read" token sees what the user sees, but changes nothing.
        everywhere: she may write in every namespace, and see everything.
    """

    name: str
    role: Literal["read", "write"] = "write"
    everywhere: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"A user cannot be named {self.name!r}.")
        if self.role not in ("read", "write"):
            raise ValueError(f'role must be "read" or "write", not {self.role!r}.')


#: Whose the Hub is where no users are named.
OWNER = User("demo", everywhere=True)

#: Where the owner's token is kept, in the Hub's folder; ``HF_TOKEN_PATH`` may name it.
TOKEN_FILE = "token"


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(24)


def owner_token(root: str | os.PathLike[str]) -> str:
    """The token of a Hub's owner: made when the Hub first starts, and kept where only she can read it."""
    path = Path(root) / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or not path.read_text("ascii").strip():
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # readable by nobody else
        with os.fdopen(handle, "w") as file:
            file.write(new_token())
        os.replace(partial, path)
    return path.read_text("ascii").strip()


def users_by_token(users: Mapping[str, str | User]) -> dict[str, User]:
    """Plain names stand for users who may read and write."""
    return {token: User(user) if isinstance(user, str) else user for token, user in users.items()}
