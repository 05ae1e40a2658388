"""Who may use the Hub: names, roles, organisations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class User:
    """What one token stands for.

    Args:
        name: of the user, and of the namespace that is hers.
        role: a "read" token sees what the user sees, but changes nothing.
        orgs: further namespaces she may write in.
        expires: when the token stops working; by default never.
    """

    name: str
    role: Literal["read", "write"] = "write"
    orgs: tuple[str, ...] = ()
    expires: datetime | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.orgs):
            if not _NAME.fullmatch(name):
                raise ValueError(f"A user or organisation cannot be named {name!r}.")
        if self.role not in ("read", "write"):
            raise ValueError(f'role must be "read" or "write", not {self.role!r}.')
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError("expires needs a time zone.")

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.name, *self.orgs)

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(UTC)


def users_by_token(users: Mapping[str, str | User] | None) -> dict[str, User] | None:
    """Plain names stand for users who may read and write."""
    if users is None:
        return None
    return {token: User(user) if isinstance(user, str) else user for token, user in users.items()}
