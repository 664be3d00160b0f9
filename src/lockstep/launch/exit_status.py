"""Verdict: what the failures of workers add up to: which one is told whole, and the exit code of the run. Knows no processes."""

from __future__ import annotations

from lockstep.launch.console import Console, Failure


class ExitStatus:
    """An incident begins with a generation: what was survived before it does not count.

    A worker that merely lost a peer failed in consequence: it is told whole, and gives its code, only if there is no cause.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._codes: dict[int, int] = {}
        self._consequences: dict[int, Failure] = {}
        self._told_whole = False
        self._accounted: set[int] = set()
        self._finished: set[int] = set()
        self._has_survived = False  # once workers have met, the death of one of them may be made good

    def new_incident(self) -> None:
        self._codes, self._consequences, self._told_whole = {}, {}, False
        self._has_survived = True

    def finished(self, worker: int) -> None:
        self._finished.add(worker)
        self._accounted.add(worker)

    def ended(self, worker: int, code: int) -> None:
        """Its process is gone."""
        if code != 0:
            self._codes.setdefault(worker, code)

    def codes(self) -> dict[int, int]:
        """Of workers that ended badly in this incident."""
        return dict(self._codes)

    def has_told(self, worker: int) -> bool:
        """Whether it said itself how its script ended."""
        return worker in self._accounted

    def failed(self, worker: int, code: int, failure: Failure, *, tell: bool) -> None:
        self._accounted.add(worker)
        self._codes.setdefault(worker, code)
        is_consequence = "PeerError" in failure.error.split(":")[0]
        if is_consequence:
            self._consequences[worker] = failure
        if tell:
            whole = not is_consequence and not self._told_whole
            self._told_whole = self._told_whole or whole
            self._console.failed(failure, whole=whole)

    def close(self, code: int) -> int:
        """The run has ended with ``code``, as membership has it: the script's own, which may differ, is returned."""
        if code == 0:
            return next((c for worker, c in self._codes.items() if worker in self._finished or not self._has_survived), 0)
        if not self._told_whole:
            for failure in list(self._consequences.values())[:1]:
                self._console.failed(failure, whole=True)
        causes = [c for worker, c in self._codes.items() if worker not in self._consequences] or list(self._codes.values())
        return next((c for c in causes if c != 0), code)
