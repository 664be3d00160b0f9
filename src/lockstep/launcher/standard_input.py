"""StandardInput: what each worker gets as its stdin. Passes on bytes; does not know what a worker does with them.

A single worker reads the stdin of `lockstep run`. If that is a terminal, the agent reads it and passes it on: the worker belongs to
another process group, so that Ctrl-C reaches the agent alone, and the kernel stops a process that reads the terminal of another
group. The worker of ``--debug-rank`` has the terminal itself. All other workers read nothing.
"""

from __future__ import annotations

import os
import select
import selectors
import signal

from lockstep.launcher.worker import WorkerSpec

_READ_BYTES = 4096


class StandardInput:
    """``on_time`` must be called often. The pipe to the worker is replaced if the worker is."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._pipe: int | None = None
        self._is_watched = False

    def open(self, spec: WorkerSpec) -> int:
        """Returns the descriptor that becomes the stdin of a worker."""
        if spec.has_terminal or (spec.reads_stdin and not os.isatty(0)):
            return os.dup(0)
        if not spec.reads_stdin:
            return os.open(os.devnull, os.O_RDONLY)
        self.close()
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # `lockstep run ... &` must not be stopped because a person types
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        return theirs

    def on_time(self) -> None:
        """Watch the terminal while it belongs to this process group and the worker has room for more."""
        wanted = self._pipe is not None and _is_foreground() and bool(select.select([], [self._pipe], [], 0)[1])
        if wanted and not self._is_watched:
            self._selector.register(0, selectors.EVENT_READ, self._pass_on)
        elif not wanted and self._is_watched:
            self._selector.unregister(0)
        self._is_watched = wanted

    def close(self) -> None:
        """May be called twice."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        self.on_time()

    def _pass_on(self) -> None:
        """Pass on a line, or the end of the input: Ctrl-D."""
        if self._pipe is None or not _is_foreground():
            return
        try:
            data = os.read(0, _READ_BYTES)
            if data:
                os.write(self._pipe, data)
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # the terminal or the worker is gone
        self.close()


def _is_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
