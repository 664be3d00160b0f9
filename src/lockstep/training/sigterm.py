"""SIGTERM without an agent: a machine is about to be taken away. Remembered until a step ends, where the run saves and leaves."""

from __future__ import annotations

import signal
import threading


class Sigterm:
    """A handler of the user's own stays; ``close`` gives the default back."""

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
