"""Errors of the Hub, in one line that says what to do."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import errors as hf

from ..commits import is_connection
from ..escape import one_line

#: Characters of a server's reason that are shown: a paragraph.
LONGEST_REASON = 1_000

#: Trouble with the machine's own disk.
_DISK = {
    errno.ENOSPC: "No space is left on the disk{}: free some, or move the cache with HF_HOME.",
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM),
        "Files cannot be written here{}: choose another folder, or move the cache with HF_HOME.",
    ),
}


class HubError(RuntimeError):
    """The Hub could not do what was asked; the message says why and what to do."""


@contextmanager
def hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn the client's exceptions inside the block into `HubError`."""
    try:
        yield
    except hf.GatedRepoError:  # a subclass of RepositoryNotFoundError
        raise HubError(f"{repo_id} is gated: ask for access on its page, then log in with `hf auth login`.") from None
    except hf.RepositoryNotFoundError:
        raise HubError(
            f"{repo_id} does not exist on {endpoint}, or is private: check the name, or log in with `hf auth login`."
        ) from None
    except hf.RevisionNotFoundError:
        raise HubError(f"{repo_id} has no such revision: check the branch, tag or commit.") from None
    except hf.LocalEntryNotFoundError as error:
        raise HubError(f"{repo_id} is not in the cache, and {endpoint} was not reached: {_line(error)}") from None
    except hf.EntryNotFoundError as error:
        raise HubError(f"{repo_id} lacks a file: {_line(error)}") from None
    except hf.OfflineModeIsEnabled:
        raise HubError("The Hub is switched off by HF_HUB_OFFLINE=1: unset it, or use what is in the cache.") from None
    except hf.HfHubHTTPError as error:
        raise HubError(_of_status(error, repo_id, endpoint)) from None
    except Exception as error:
        if is_connection(error):
            what = f"{endpoint} cannot be reached ({_line(error)}): check the network or HF_ENDPOINT."
            raise HubError(what) from None
        if isinstance(error, OSError) and error.errno in _DISK:
            place = f" ({error.filename})" if error.filename else ""
            raise HubError(_DISK[error.errno].format(place)) from None
        raise


def readable(error: Exception, endpoint: str) -> Exception:
    """What the library raised, as `hub_errors` understands it; of answers without sense it raises anything."""
    if isinstance(error, RuntimeError) and not isinstance(error, HubError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of an upload in parts
    is_known = isinstance(error, HubError | hf.HfHubHTTPError | hf.LocalEntryNotFoundError | hf.OfflineModeIsEnabled)
    if is_known or is_connection(error) or (isinstance(error, OSError) and error.errno is not None):
        return error
    if isinstance(error, ValueError | OSError) and not isinstance(error, json.JSONDecodeError):  # it says why
        return HubError(f"{endpoint}: {_line(error)}")
    return HubError(f"{endpoint} gives answers that make no sense ({one_line(repr(error), 100)}): is it a Hub?")


def _of_status(error: hf.HfHubHTTPError, repo_id: str, endpoint: str) -> str:
    status = error.response.status_code
    if status == 401:
        return f"{endpoint} does not accept the token: log in with `hf auth login`, or pass token=."
    if status == 403:
        return f"You may not write to {repo_id} ({_line(error)}): use a token with write access to its namespace."
    if status in (409, 412):
        return f"{repo_id} has changed meanwhile: look at the new version, then push again."
    if "HF_HUB_DISABLE_XET" in str(error):
        return f"{endpoint} has no Xet storage: set HF_HUB_DISABLE_XET=1 before starting Python and push again."
    return f"{endpoint} answered {status}: {_line(error)}"


def _line(error: Exception) -> str:
    """What the server said, where it said something."""
    text = " ".join((getattr(error, "server_message", None) or str(error)).split())
    return one_line(text, limit=LONGEST_REASON) or type(error).__name__
