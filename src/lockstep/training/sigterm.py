"""Sigterm: remembers a SIGTERM until the step ends, where the run saves a checkpoint and exits. Used without an agent."""

from __future__ import annotations

import signal
import threading


class Sigterm:
    """Installs a handler unless the user has installed one. ``close`` restores the default handler."""

    def __init__(self) -> None:
        self.came = False
        is_main = threading.current_thread() is threading.main_thread()
        self._ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._ours:
            signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        if self._ours and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, *_: object) -> None:
        self.came = True
