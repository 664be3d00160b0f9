"""LocalRun: a run whose workers are all on this machine: one process decides about them and watches them. No torch."""

from __future__ import annotations

import signal
import time

from lockstep.launcher.console import Console
from lockstep.launcher.event_loop import STOP_SIGNALS, EventLoop
from lockstep.launcher.failure_text import Failure
from lockstep.launcher.local_machine import LocalMachine
from lockstep.launcher.nonblocking_output import NonblockingOutput
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.supervisor import Settings, Supervisor
from lockstep.launcher.zygote_start import ZygoteStart


class LocalRun:
    """Runs a script or function on ``settings.size`` workers. Call ``run`` once, in the main thread.

    ``zygote_start``: how the process is started that forks the workers, which knows what they execute.
    """

    def __init__(self, settings: Settings, zygote_start: ZygoteStart, run_folder: RunFolder) -> None:
        self._settings, self._run_folder = settings, run_folder
        self._output = NonblockingOutput()
        self._console = Console(self._output, shows_progress=settings.debug_rank is None, is_plain=settings.is_plain)
        self._loop = EventLoop(self._on_signal)
        self._machine = LocalMachine(self._loop.selector, zygote_start, run_folder, self._console.say)
        self._supervisor = Supervisor(settings, self._machine, run_folder, self._console, self._loop.selector, self._loop.clock.now)

    def run(self) -> int:
        """Block until the run is over and every process is gone; returns the exit code."""
        with self._loop:
            try:
                self._machine.start(self._supervisor)
                self._supervisor.start()
                while not self._supervisor.is_over:
                    self._loop.run_once(min(self._supervisor.next_at, self._machine.next_at))
                    now = time.monotonic()
                    self._output.flush()
                    self._machine.on_time(now, self._loop.clock.now(), self._settings.policy.hang_timeout_s)
                    self._supervisor.on_time(now)
                return self._supervisor.end()
            finally:
                self._machine.close()
                self._supervisor.close()
                self._console.close()
                self._run_folder.close()

    @property
    def cause(self) -> Failure | None:
        """The failure that ended the run; None if there was none."""
        return self._supervisor.cause

    @property
    def finished(self) -> dict[int, int]:
        """Rank -> the worker that had this rank when its script reached the end."""
        return self._supervisor.finished

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._machine.reap()
        elif number in STOP_SIGNALS:
            self._supervisor.on_signal(number)
