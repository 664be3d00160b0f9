"""ExitStatus: the exit code of a run and its last message, and which failure is shown with its traceback. Knows no processes.

Only failures since the last generation was formed count: the run has recovered from those before. A worker that raised a
PeerError failed because of another worker. Its traceback and its code are used only if no worker failed for a reason of its own.
The same error of several workers is shown once.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from lockstep.launcher.console import Console
from lockstep.launcher.failure_text import Failure, first_line, same_failure_text
from lockstep.plan.membership_events import End


class ExitStatus:
    def __init__(self, console: Console, run_folder: Path) -> None:
        self._console, self._run_folder = console, run_folder
        self._codes: dict[int, int] = {}  # of the workers that failed
        self._peer_errors: dict[int, Failure] = {}
        self.cause: Failure | None = None
        """The first failure since the last generation was formed or all workers were started again, peer errors last."""
        self._shown: dict[str, list[int]] = {}  # cause of a failure that was shown -> the other workers that failed by it
        self._cause_shown = False
        self._errors: set[str] = set()  # that were shown, as each worker has worded them
        self._traced: set[str] = set()  # causes of failures that were shown with their tracebacks, in the whole run
        self._reported: set[int] = set()
        self._finished: set[int] = set()
        self._members: set[int] = set()  # of all generations so far
        self._staying: set[int] = set()  # of the last generation
        self._checkpoint: tuple[int, str] | None = None
        self.stopped_after: int | None = None
        """The step after which all workers stopped because they were told to; None if they were not."""
        self.has_said_where = False
        """Whether the last message named the newest checkpoint, or the files of the run."""

    def generation_formed(self, members: Sequence[int]) -> None:
        self._forget_failures()
        self._members.update(members)
        self._staying = set(members)

    def workers_restart(self) -> None:
        """All workers are gone and start again: what has failed before does not count any more."""
        self._forget_failures()
        self._finished = set()

    def _forget_failures(self) -> None:
        self._show_others()
        self._codes, self._peer_errors, self._shown, self._cause_shown, self.cause = {}, {}, {}, False, None

    def checkpoint_saved(self, step: int, path: str) -> None:
        """The newest checkpoint is of ``step``."""
        self._checkpoint = (step, path)

    def workers_stopped(self, step: int) -> None:
        """The workers stopped after ``step``, because they were told to."""
        self.stopped_after = step

    @property
    def checkpoint(self) -> tuple[int, str] | None:
        """Step and path of the newest checkpoint that this run has saved."""
        return self._checkpoint

    def worker_finished(self, worker: int) -> None:
        self._finished.add(worker)
        self._reported.add(worker)

    def worker_exited(self, worker: int, code: int) -> None:
        if code != 0:
            self._codes.setdefault(worker, code)

    def has_reported(self, worker: int) -> bool:
        """Whether the worker itself has reported how its script ended."""
        return worker in self._reported

    def worker_failed(self, code: int, failure: Failure, *, show: bool) -> None:
        self._reported.add(failure.worker)
        self._codes.setdefault(failure.worker, code)
        if failure.is_peer_error:
            self._peer_errors[failure.worker] = failure
        if self.cause is None or (not failure.is_peer_error and self.cause.worker in self._peer_errors):
            self.cause = failure
        if show:
            self._show(failure)

    def spare_failed(self, failure: Failure, *, show: bool) -> None:
        """A worker has failed that the run did not need: this is shown, and has no influence on how the run ends."""
        self._reported.add(failure.worker)
        if show:
            self._show(failure)

    def _show(self, failure: Failure) -> None:
        """The workers' deaths are reported by plan/membership.py: here, what they have said themselves."""
        if failure.is_crash:
            self._cause_shown = True
            self._console.show_crash(failure)
            return
        self._errors.add(failure.error)
        if failure.cause in self._shown:
            self._shown[failure.cause].append(failure.worker)
        else:
            self._shown[failure.cause] = []
            self._show_first(failure)

    def _show_first(self, failure: Failure) -> None:
        """The first failure of its cause since the last generation was formed, or since all workers were started again."""
        if failure.cause in self._traced:
            self._cause_shown = True
            self._console.say(f"{failure.name} on {failure.host} failed with the same error again.")
            return
        with_traceback = not failure.is_peer_error and not self._cause_shown
        if with_traceback:
            self._cause_shown = True
            self._traced.add(failure.cause)
        self._console.show_exception(failure, with_traceback=with_traceback)

    def _show_others(self) -> None:
        for others in self._shown.values():
            if others:
                self._console.say(same_failure_text(others))
        self._shown = {cause: [] for cause in self._shown}

    def after_signal(self, number: int) -> tuple[int, str]:
        """The run was stopped by a signal: show the last message; returns the exit code and the reason.

        The code is 0 if the workers have saved the step after which they stopped.
        """
        self._show_others()
        code, why = 128 + number, f"stopped by {signal.Signals(number).name}"
        # A worker that was still starting was ended by the agent's own signal.
        is_clean = not any(worker in self._members for worker in self._codes)
        if self._checkpoint is not None:
            if self._is_saved and is_clean:
                code, why = 0, f"{why} at step {self.stopped_after}, which is saved"
            self._say_last(f"{why}.{self._how_to_resume()}")
        return code, why

    def after_end(self, end: End) -> tuple[int, str]:
        """The run is over: show the last message; returns the exit code, which is the script's own if it failed, and the reason."""
        code, reason = self._code_after(end.code), end.why
        self._show_others()
        for note in end.notes:
            self._console.say(note)
        if code == 0 and self.stopped_after is not None:
            reason = f"all workers got SIGTERM and stopped at step {self.stopped_after}, which is "
            reason += "saved" if self._is_saved else "not saved"
            code = 0 if self._is_saved else 128 + signal.SIGTERM
            if self._is_saved:
                self._say_last(f"{reason}.{self._how_to_resume()}")
        if code != 0:
            why = f"the run ended with code {code}: {first_line(self._without_error(reason))}"
            self._say_last(f"{why}. Its files are in {self._run_folder}.{self._how_to_resume()}")
        return code, reason

    def _say_last(self, text: str) -> None:
        self.has_said_where = True
        self._console.say(text)

    def _without_error(self, reason: str) -> str:
        """The error was shown already, with its place."""
        return next((reason.removesuffix(f": {error}") for error in self._errors if reason.endswith(f": {error}")), reason)

    @property
    def _is_saved(self) -> bool:
        """Whether the step after which the workers stopped is saved."""
        return self._checkpoint is not None and self._checkpoint[0] == self.stopped_after

    def _code_after(self, code: int) -> int:
        if code == 0:  # once a generation was formed, the death of a worker that had not finished, or had left, is made good
            finished = self._finished & self._staying
            return next((c for worker, c in self._codes.items() if worker in finished or not self._members), 0)
        if not self._cause_shown:
            for failure in list(self._peer_errors.values())[:1]:
                self._console.show_exception(failure, with_traceback=True)
        causes = [c for worker, c in self._codes.items() if worker not in self._peer_errors] or list(self._codes.values())
        return next((c for c in causes if c != 0), code)

    def _how_to_resume(self) -> str:
        if self._checkpoint is None:
            return ""
        step, path = self._checkpoint
        return f" The newest checkpoint is of step {step} ({path}). The same command resumes from it."
