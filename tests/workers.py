"""Runs a function on N real processes that form one world, without an agent.

    results = run_workers(body, 4, argument)        # body(rank, size, argument) on each of 4 processes

Every run has a deadline. At the deadline every worker that still runs writes its stack and is killed, and the test fails.
A worker that raises or dies fails the test with its traceback and what it has printed, unless ``check=False``: then the outcomes
are returned (``Outcome.value``, ``Outcome.error`` with type name and message, or ``Outcome.signal``).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.fork_server import Child, fork
from tests.waiting import wait_until


@dataclass
class Outcome:
    """How one worker ended."""

    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""
    signal: int = 0


class WorkerProcesses:
    """Workers that were started and not yet collected.

    Args:
        body: called as ``body(rank, size, *args)`` in each worker.
        size: the number of workers.
        args: anything that can be pickled.
        env: variables that the workers get besides their rank, size and store.
    """

    def __init__(self, body: Callable[..., Any], size: int, args: tuple[Any, ...], env: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="workers-")
        self.processes: list[Child] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = Pipe(duplex=False)
            world = {
                "LOCKSTEP_RANK": str(rank),
                "LOCKSTEP_SIZE": str(size),
                "LOCKSTEP_STORE": f"file://{self.folder.name}/store",
                **env,
            }
            with there, self._output(rank).open("wb") as output:
                child = fork(_enter, body, rank, size, args, world, descriptors=[there.fileno()], output=output.fileno())
            self.processes.append(child)
            self.pipes.append(here)

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(with_signal)

    def wait_for_notes(self, *names: str, deadline_s: float = 30.0) -> None:
        """Wait until workers have left all these notes with ``leave_note``."""
        notes = [Path(self.folder.name, f"note-{name}") for name in names]
        wait_until(lambda: all(note.exists() for note in notes), f"workers have left the notes {names}", deadline_s)

    def collect(self, deadline_s: float) -> list[Outcome]:
        """Wait for all workers. Returns their outcomes by rank; fails if one of them still runs after ``deadline_s`` seconds."""
        outcomes = [Outcome() for _ in self.processes]
        open_ = dict(enumerate(self.pipes))
        end = time.monotonic() + deadline_s
        while open_ and time.monotonic() < end:
            for pipe in wait(list(open_.values()), timeout=max(0.0, end - time.monotonic())):
                rank = next(r for r, p in open_.items() if p is pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())  # from our own child
                except EOFError:
                    outcomes[rank] = Outcome(signal=-self.processes[rank].wait(5), trace=self._output(rank).read_text())
                del open_[rank]
        printed = self._end(sorted(open_))
        self.folder.cleanup()
        if open_:
            raise AssertionError(f"ranks {sorted(open_)} still ran after {deadline_s} s.\n{printed}")
        return outcomes

    def _end(self, late: list[int]) -> str:
        """Let every worker leave, and kill those that do not. Returns what was printed, if workers are late."""
        for rank in late:
            self.kill(rank, signal.SIGCONT)
            self.kill(rank, signal.SIGUSR1)  # writes the stack of every thread to the worker's output
        end = time.monotonic() + (1 if late else 10)
        for child in self.processes:
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.001)
            child.kill()
            child.wait(5)
        for pipe in self.pipes:
            pipe.close()
        return "".join(f"-- rank {rank}:\n{self._output(rank).read_text()}" for rank in range(len(self.processes))) if late else ""

    def _output(self, rank: int) -> Path:
        return Path(self.folder.name, f"output-{rank}.txt")


def run_workers(
    body: Callable[..., Any],
    size: int,
    *args: Any,
    deadline_s: float = 60.0,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``body(rank, size, *args)`` on ``size`` processes. Returns what each of them returned, or, unchecked, their outcomes."""
    outcomes = WorkerProcesses(body, size, args, env or {}).collect(deadline_s)
    if not check:
        return outcomes
    for rank, outcome in enumerate(outcomes):
        if outcome.error or outcome.signal:
            raise AssertionError(f"rank {rank} failed: {outcome.error or outcome.signal}\n{outcome.trace}")
    return [outcome.value for outcome in outcomes]


def leave_note(name: str) -> None:
    """In a worker: tell the others, and the test, something that cannot go over the comm under test."""
    _note(name).touch()


def wait_for_notes(*names: str, deadline_s: float = 20.0) -> None:
    """In a worker: wait until all these notes are left."""
    wait_until(lambda: all(_note(name).exists() for name in names), f"workers have left the notes {names}", deadline_s)


def _note(name: str) -> Path:
    return Path(os.environ["LOCKSTEP_STORE"].removeprefix("file://")).with_name(f"note-{name}")


def _enter(pipe: int, body: Callable[..., Any], rank: int, size: int, args: tuple[Any, ...], world: dict[str, str]) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    os.environ.update(world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        outcome = Outcome(value=body(rank, size, *args))
    except BaseException as error:  # noqa: BLE001 - handed to the test, which raises it; pytest's own are no Exceptions
        outcome = Outcome(error=(type(error).__name__, str(error)), trace=traceback.format_exc())
    with Connection(pipe, readable=False) as connection:
        connection.send_bytes(pickle.dumps(outcome))  # plain pickle: tensors by value, no descriptors that die with us
    for child in multiprocessing.active_children():  # data loaders
        child.terminate()
