"""BackgroundTask: one function call in a thread of its own, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """Starts at once. An exception ends the task and is kept as text in ``error``, which is empty if there was none."""

    def __init__(self, action: Callable[[], None], name: str, *, finish_at_exit: bool = False) -> None:
        """If ``finish_at_exit``, the interpreter waits for the task before it exits."""
        self.error = ""
        self._action = action
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=not finish_at_exit).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the task. Returns whether it has ended."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - a storage may raise anything; training continues and the error is reported
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._done.set()
