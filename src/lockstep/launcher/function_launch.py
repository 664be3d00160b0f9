"""``lockstep.launch``: runs a function on several workers, from a notebook or a plain script. Does not supervise them itself.

    the caller                 waits, and shows what the agent prints
      `- agent                 a fork of the caller; supervises as `lockstep run` does
           |- zygote           a fork of the agent, or a new interpreter if workers are spawned; forks the workers
           `- workers          call the function

The agent is a process of its own, because it adopts and kills all orphans among its descendants, which must not be the caller's.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import math
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import UsageError, WorkerError
from lockstep.launcher import linux, zygote
from lockstep.launcher.function_call import call_and_save, forget_parent, load_result, save_function
from lockstep.launcher.local_run import LocalRun
from lockstep.launcher.new_run import create_run_folder, discard_run_folder
from lockstep.launcher.outcome import failure_text, read_outcome, workers_by_rank, write_outcome
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.supervisor import Settings
from lockstep.launcher.worker import Entrypoint
from lockstep.launcher.zygote_start import ForkStart, InterpreterStart, ZygoteStart
from lockstep.plan.membership_state import Policy

_START_METHODS = ("auto", "fork", "spawn")


def launch(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    start_method: str = "auto",
    run_dir: str | os.PathLike[str] | None = None,
    hang_timeout: float = 30.0,
    max_respawns: int = 10,
    max_restarts: int = 3,
    spares: int = 0,
) -> list[Any]:
    """Call ``fn(*args)`` on ``n`` workers of this machine, from a notebook or a plain script, and return the results.

    Each worker is a process. It has the environment that `lockstep run` gives to a script: :class:`lockstep.Run`,
    :func:`lockstep.replicate` and ``torch.distributed`` find the other workers in it. Workers that die are replaced, or all of them
    are started again, as under `lockstep run`. What rank 0 prints is shown here; the output of all workers is in the run folder.
    Ctrl-C (in a notebook: interrupt the kernel) stops the workers.

    Args:
        fn: The function. Forked workers can call any function, also one that is defined in a notebook. Spawned workers import it.
        n: How many workers to start.
        *args: The arguments of the function. Forked workers get copies of the objects, not the objects themselves.
        start_method: ``"fork"``: workers are copies of this interpreter, with everything that is defined in it. They use one thread
            each, because torch's threads do not survive a fork, unless this process has a single thread. ``"spawn"``: workers start
            in a new interpreter, which must be able to import the function; its script needs ``if __name__ == "__main__":``.
            ``"auto"``: ``"fork"``, unless this process has used CUDA, which cannot be forked.
        run_dir: The folder for logs, events and results; default: a new folder under ``lockstep-runs``.
        hang_timeout: A worker for which others wait this many seconds is killed.
        max_respawns: How many workers are replaced in 5 minutes.
        max_restarts: How often all workers are started again, if the function does not use ``lockstep.Run``.
        spares: How many more workers stand by, to take the place of one that is lost. A spare calls the function too, and waits in
            the loop over the data. What a spare returns that was not needed is not returned.

    Returns:
        What the function has returned on each worker, by rank. There are fewer than ``n`` results if a ``Run`` has fewer lanes, or
        if a worker was lost so late that its replacement could not join any more.

    Raises:
        WorkerError: The run failed. The message has the traceback of the worker that failed first.
        UsageError: An argument cannot work, or this process is a worker itself.

    Example:
        >>> import lockstep
        >>> lockstep.launch(lambda base: base + lockstep.World.detect().rank, 2, 10)
        [10, 11]
    """
    _check(fn, n, start_method, hang_timeout, max_respawns, max_restarts, spares)
    forks = start_method == "fork" or (start_method == "auto" and not _has_used_cuda())
    if forks and "torch" in sys.modules:
        for name in zygote.PRELOAD:  # here and now, so that not every worker imports it again
            importlib.import_module(name)
    if start_method == "fork" and _has_used_cuda():
        raise UsageError(
            "start_method='fork' cannot be used: this process has used CUDA, which does not work in a fork. Call lockstep.launch "
            "before CUDA is used, or pass start_method='spawn'."
        )
    policy = Policy(max_respawns=max_respawns, hang_timeout_s=float(hang_timeout), max_restarts=max_restarts, spares=spares)
    settings = Settings(n, policy=policy, threads=1 if forks and linux.threads() > 1 else None)
    requested = None if run_dir is None else os.fspath(run_dir)
    run_folder = create_run_folder(requested, "launch", [getattr(fn, "__qualname__", repr(fn))])
    try:
        start = _zygote_start(fn, args, run_folder.path / "function.pickle", forks=forks)
    except UsageError:
        discard_run_folder(run_folder, requested)
        raise
    try:
        agent = _AgentProcess(settings, start, run_folder)
    finally:
        run_folder.leave()  # the agent has it
    outcome = agent.wait()
    if outcome is None:
        raise WorkerError(f"the process that supervises the workers was killed. The files of the run are in {run_folder.path}.")
    if outcome["code"] != 0:
        raise WorkerError(failure_text(outcome, f"The files of the run are in {run_folder.path}."))
    return [load_result(run_folder.worker(worker)) for worker in workers_by_rank(outcome)]


def _check(fn: Any, n: Any, start_method: str, hang_timeout: Any, *limits: Any) -> None:
    if not callable(fn):
        raise UsageError(f"lockstep.launch got {fn!r}, which cannot be called. Call it as lockstep.launch(fn, n, *args).")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"n={n!r} is not a number of workers. Call it as lockstep.launch(fn, n, *args), with n at least 1.")
    if start_method not in _START_METHODS:
        raise UsageError(f"start_method={start_method!r} is unknown. Choose one of {', '.join(_START_METHODS)}.")
    if not isinstance(hang_timeout, int | float) or not 0 < hang_timeout < math.inf:
        raise UsageError(f"hang_timeout={hang_timeout!r} is not a number of seconds. Pass a positive number, 30 for example.")
    for name, limit in zip(("max_respawns", "max_restarts", "spares"), limits):
        if not isinstance(limit, int) or limit < 0:
            raise UsageError(f"{name}={limit!r} is not a whole number of at least 0.")
    if "LOCKSTEP_AGENT_FD" in os.environ:
        raise UsageError(
            "lockstep.launch was called in a worker of another run: every worker would start workers of its own. Call it in a "
            "process that is no worker; in a script that spawned workers import, call it under `if __name__ == '__main__':`."
        )


def _has_used_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _zygote_start(fn: Callable[..., Any], args: tuple[Any, ...], path: Path, *, forks: bool) -> ZygoteStart:
    if forks:
        return ForkStart(functools.partial(_serve_forks, functools.partial(call_and_save, fn, args)))
    save_function(path, fn, args)
    return InterpreterStart(Entrypoint(None, "lockstep.launcher.function_call", (str(path),), os.getcwd()))


def _serve_forks(execute: Callable[[], None], connection: socket.socket, agent_pid: int) -> NoReturn:
    """What the zygote does if it is a fork of this interpreter."""
    forget_parent()
    zygote.serve(connection, agent_pid, execute, {})
    os._exit(0)


class _AgentProcess:
    """The agent of a run, as a fork of this process."""

    def __init__(self, settings: Settings, start: ZygoteStart, run_folder: RunFolder) -> None:
        self._ends = {name: os.pipe() for name in ("stdout", "stderr")}
        self._run_dir = run_folder.path
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        caller = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, if this process has threads
            self._pid = os.fork()
        if self._pid == 0:
            self._become_agent(settings, start, run_folder, caller)
        for _, theirs in self._ends.values():
            os.close(theirs)

    def wait(self) -> dict[str, Any] | None:
        """Show what the agent prints until it is gone; returns how the run has ended, or None if the agent was killed.

        Ctrl-C is passed on to the agent, and raised as KeyboardInterrupt when the run has ended.
        """
        interrupt = None
        selector = selectors.DefaultSelector()
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._ends}
        for name, (ours, _) in self._ends.items():
            selector.register(ours, selectors.EVENT_READ, name)
        while selector.get_map():
            try:
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    stream = sys.stdout if key.data == "stdout" else sys.stderr
                    stream.write(decoders[key.data].decode(data))
                    stream.flush()
                    if not data:
                        selector.unregister(key.fd)
            except KeyboardInterrupt as error:
                interrupt = error
                os.kill(self._pid, signal.SIGINT)
        selector.close()
        os.waitpid(self._pid, 0)
        for ours, _ in self._ends.values():
            os.close(ours)
        if interrupt is not None:
            raise interrupt
        return read_outcome(self._run_dir)

    def _become_agent(self, settings: Settings, start: ZygoteStart, run_folder: RunFolder, caller: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the caller alone, which passes it on
            linux.die_with_parent(caller)
            for ours, _ in self._ends.values():
                os.close(ours)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in enumerate((nothing, self._ends["stdout"][1], self._ends["stderr"][1])):
                os.dup2(source, target)
                os.close(source)
            run = LocalRun(settings, start, run_folder)
            code = run.run()
            write_outcome(run_folder.path, code, run.finished, run.cause)
        except BaseException:  # noqa: BLE001 - this process must not continue as the caller
            sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(code)
