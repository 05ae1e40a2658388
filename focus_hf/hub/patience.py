"""How long a command waits for a Hub, whatever the server does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .errors import HubError

#: Seconds that a command waits for a Hub in all, beyond the time in which files arrive. The Hub answers within one.
PATIENCE = 60.0

#: Bytes a second at which files arrive at least: the slowest connections that people have send twice as many.
SLOWEST = 10_000

T = TypeVar("T")


class Patience:
    """How long an operation of several requests still waits.

    Args:
        seconds: at most, beyond the time that arriving bytes give it; `PATIENCE` by default.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = PATIENCE if seconds is None else seconds
        self._until = time.monotonic() + self.seconds
        self.over = False

    @property
    def left(self) -> float:
        return 0.0 if self.over else self._until - time.monotonic()

    def arrived(self, count: int) -> None:
        """Bytes of a file have arrived, or are to be sent: it may take longer."""
        self._until += count / SLOWEST

    def wait_for(self, work: Callable[[], T], where: str) -> T:
        """The result of ``work``, which another thread does: no server keeps this one.

        Raises:
            HubError: it was not done in time. The other thread ends with its next byte.
        """
        results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((work(), None))
            except BaseException as error:
                results.put((None, error))

        threading.Thread(target=run, daemon=True, name="focus_hf-transfer").start()
        try:
            while True:
                try:
                    result, error = results.get(timeout=max(0.0, min(self.left, 1.0)))
                    break
                except queue.Empty:
                    if self.left <= 0:
                        raise HubError(
                            f"{where} did not answer within {self.seconds:.0f} seconds, or sends less than "
                            f"{SLOWEST:,} bytes a second: try again later."
                        ) from None
        except BaseException:  # Ctrl-C as well
            self.over = True
            raise
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
