"""Runs a function on N real processes, forked from one that has imported torch.

    results = run_workers(body, 4, argument)        # body(rank, size, argument) on each of 4 processes

Every run has a deadline; at the deadline all workers' stacks are printed and they are killed. A
worker that raises fails the test with its traceback, unless ``check=False``, when the outcomes are
returned: ``Outcome.value``, ``Outcome.error`` (type name and message) or ``Outcome.signal``.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer imports it, 1.2 s in every worker
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.replicas.ddp"])


@dataclass
class Outcome:
    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""
    signal: int = 0


class WorkerProcesses:
    """Workers that were started and not yet collected."""

    def __init__(self, body: Callable[..., Any], size: int, args: tuple[Any, ...], env: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            world = {
                "LOCKSTEP_RANK": str(rank),
                "LOCKSTEP_SIZE": str(size),
                "LOCKSTEP_STORE": f"file://{self.folder.name}/store",
                **env,
            }
            process = _context.Process(target=_enter, args=(body, rank, size, args, world, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, with_signal)

    def collect(self, deadline_s: float) -> list[Outcome]:
        """Outcomes by rank. Whoever is not done at the deadline prints its stack and is killed."""
        outcomes = [Outcome() for _ in self.processes]
        open_ = dict(enumerate(self.pipes))
        end = time.monotonic() + deadline_s
        while open_ and time.monotonic() < end:
            for pipe in wait(list(open_.values()), timeout=max(0.0, end - time.monotonic())):
                rank = next(r for r, p in open_.items() if p is pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())  # from our own child
                except EOFError:
                    self.processes[rank].join(5)
                    outcomes[rank] = Outcome(signal=-(self.processes[rank].exitcode or 0))
                del open_[rank]
        late = sorted(open_)
        for rank in late:
            os.kill(self.processes[rank].pid, signal.SIGCONT)
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        for rank in late:
            self.processes[rank].join(1)
        for process in self.processes:
            process.join(0 if late else 10)
            if process.is_alive():
                process.kill()
                process.join(5)
        self.folder.cleanup()
        if late:
            raise AssertionError(f"ranks {late} were not done after {deadline_s} s; their stacks are in the captured stderr")
        return outcomes


def run_workers(
    body: Callable[..., Any],
    size: int,
    *args: Any,
    deadline_s: float = 60.0,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    outcomes = WorkerProcesses(body, size, args, env or {}).collect(deadline_s)
    if not check:
        return outcomes
    for rank, outcome in enumerate(outcomes):
        if outcome.error or outcome.signal:
            raise AssertionError(f"rank {rank} failed: {outcome.error or outcome.signal}\n{outcome.trace}")
    return [outcome.value for outcome in outcomes]


def _enter(body: Callable[..., Any], rank: int, size: int, args: tuple[Any, ...], world: dict[str, str], pipe: Connection) -> None:
    import torch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may start data loaders
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    os.environ.update(world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        outcome = Outcome(value=body(rank, size, *args))
    except BaseException as error:  # noqa: BLE001 - handed to the test, which raises it; pytest's own are no Exceptions
        outcome = Outcome(error=(type(error).__name__, str(error)), trace=traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: tensors by value, no descriptors that die with us
    pipe.close()
