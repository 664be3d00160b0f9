"""LocalMachine: the workers of one machine with all that belongs to them: logs, local ranks, idle times, signals. Decides nothing.

`lockstep run` has one in the process that decides. `lockstep agent` has one too, and its decisions come from the head.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lockstep.launcher import packets
from lockstep.launcher.environment import Placement, RunSettings, threads_per_worker, worker_environment
from lockstep.launcher.idle_times import IdleTimes
from lockstep.launcher.local_ranks import LocalRanks
from lockstep.launcher.logs import Logs
from lockstep.launcher.master_port import MasterPort
from lockstep.launcher.run_folder import RunFolder
from lockstep.launcher.standard_input import StandardInput
from lockstep.launcher.worker import STACK_SIGNAL, WorkerSpec
from lockstep.launcher.worker_processes import WorkerProcesses
from lockstep.launcher.zygote_start import ZygoteStart
from lockstep.plan.membership_spares import device_of

_STACK_S = 0.2
"""A worker that is to be killed has this long to write its stack."""


class MachineObserver(Protocol):
    """Who is told what happens to the workers of a machine."""

    def on_packet(self, worker: int, packet: packets.Packet) -> None: ...

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        """``stream``: 1 for stdout, 2 for stderr."""

    def on_exit(self, worker: int, pid: int, status: int, last_lines: str) -> None:
        """The process is gone. ``status``: its exit code, or minus the signal. ``last_lines``: of its stderr."""

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        """These workers have no process and will get none. ``is_fatal``: neither will any other."""

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        """SIGSTOP has stopped the worker (None), or it has continued after so long. 0: the stop was too short to be seen."""

    def on_zygote_hung(self, why: str) -> None: ...


class Machines(Protocol):
    """What the supervisor asks of the machines on which the workers run: one here, or several behind their agents."""

    @property
    def ids(self) -> list[int]:
        """The workers that are running or being started."""

    @property
    def room(self) -> int | None:
        """How many workers there can be; None: any number."""

    @property
    def holds_terminal(self) -> bool:
        """Whether a worker reads the terminal of this process, for a debugger."""

    def pid(self, id: int) -> int | None: ...

    def host(self, id: int) -> str: ...

    def log(self, id: int) -> str:
        """Where the output of the worker is, for people."""

    def stack(self, id: int) -> str:
        """Where the worker writes its stack, for people."""

    def spawn(self, ids: Sequence[int], settings: RunSettings, *, are_spares: bool = False) -> dict[int, int]:
        """Start workers. Returns the rank with which each is started. A worker for which there is no room gets none.

        Spares need no room. They are spread over the machines and their GPUs.
        """

    def device(self, id: int, gpu: str) -> tuple[str, int]:
        """What a worker computes on, and how many members may (plan/membership_spares.py: device_of). ``gpu``: what it says."""

    def send(self, ids: Sequence[int], packet: packets.Packet) -> None: ...

    def signal(self, id: int, number: int) -> None: ...

    def kill_hung(self, id: int) -> None:
        """Let the worker write its stack, then kill it. Does nothing if that was asked before."""

    def stop(self, id: int, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after ``grace_s``. A worker that has no process yet is killed as soon as it has one."""

    def reap(self) -> None:
        """Find the processes that have ended, where this can be done without waiting."""

    def idle_s(self, now: float) -> dict[int, float]:
        """How long each worker has used no CPU time."""

    def cancel_unstarted(self) -> None: ...

    def kill_all(self) -> None: ...

    def forget_workers(self) -> None:
        """All workers are gone. Those that are started in their place must not meet what the others have left."""

    def keep(self, packet: packets.Packet) -> None:
        """Keep a packet for a process that may supervise the run after this one."""


class LocalMachine:
    """``say(text)`` shows a sentence to the person who started the run."""

    room: int | None = None

    def __init__(
        self,
        selector: selectors.BaseSelector,
        zygote_start: ZygoteStart,
        run_folder: RunFolder,
        say: Callable[[str], None],
    ) -> None:
        self._run_folder = run_folder
        self._logs = Logs(run_folder, say)
        self._stdin = StandardInput(selector)
        self._processes = WorkerProcesses(selector, self, self._stdin, run_folder.path / "zygote.txt", zygote_start)
        self._idle_times = IdleTimes()
        self._local_ranks = LocalRanks()
        self._master_port = MasterPort()
        self._debug_rank: int | None = None
        self._pending_kills: dict[int, float] = {}  # worker -> when; infinity: it was killed

    def start(self, observer: MachineObserver) -> None:
        """Start importing torch in the background. ``observer`` is told what happens to the workers from now on."""
        self._observer = observer
        self._processes.start_zygote()

    @property
    def ids(self) -> list[int]:
        return self._processes.ids

    @property
    def pids(self) -> dict[int, int]:
        return self._processes.pids

    @property
    def holds_terminal(self) -> bool:
        return self._debug_rank is not None and self._local_ranks.has(self._debug_rank) and os.isatty(0)

    def pid(self, id: int) -> int | None:
        return self._processes.pid(id)

    def host(self, id: int) -> str:
        return socket.gethostname()

    def log(self, id: int) -> str:
        return str(self._run_folder.log(id))

    def stack(self, id: int) -> str:
        return str(self._run_folder.stack(id))

    def spawn(
        self,
        ids: Sequence[int],
        settings: RunSettings,
        places: Mapping[int, Placement] | None = None,
        *,
        are_spares: bool = False,
    ) -> dict[int, int]:
        """``places``: where each worker is among the workers of all machines; None: there is only this machine."""
        self._debug_rank = settings.debug_rank
        spares = [id for id in ids if (are_spares if places is None else places[id].is_spare)]
        local_ranks = self._local_ranks.assign([id for id in ids if id not in spares])
        local_ranks |= self._local_ranks.assign_to_spares(spares)
        if places is None:
            places = self._places(local_ranks, settings, are_spares=are_spares)
        threads = settings.threads or threads_per_worker(settings.size, os.environ)
        specs = []
        for id, local_rank in local_ranks.items():
            self._logs.open(id)
            env = worker_environment(id, local_rank, places[id], settings, self._run_folder, threads, os.environ)
            specs.append(WorkerSpec(id, env, threads, settings.size == 1, places[id].rank == settings.debug_rank))
        self._processes.spawn(specs)
        return {id: place.rank for id, place in places.items()}

    def _places(self, local_ranks: dict[int, int], settings: RunSettings, *, are_spares: bool) -> dict[int, Placement]:
        """If there is only this machine. A spare has a rank behind those of the others."""
        address, port = "127.0.0.1", self._master_port.number
        if are_spares:
            size = max(settings.size, self._local_ranks.count)
            ranks = {id: size + local_rank for id, local_rank in local_ranks.items()}
            return {id: Placement(rank, rank + 1, size, address, port, is_spare=True) for id, rank in ranks.items()}
        size = max(settings.size, *(rank + 1 for rank in local_ranks.values()))  # the run may have been scaled up
        return {id: Placement(rank, size, size, address, port) for id, rank in local_ranks.items()}

    def device(self, id: int, gpu: str) -> tuple[str, int]:
        return device_of("", 0, gpu)

    def send(self, ids: Sequence[int], packet: packets.Packet) -> None:
        for id in ids:
            self._processes.send(id, packet)

    def signal(self, id: int, number: int) -> None:
        self._processes.signal(id, number)

    def kill_hung(self, id: int) -> None:
        if id not in self._pending_kills:
            self._pending_kills[id] = time.monotonic() + _STACK_S
            self._processes.signal(id, STACK_SIGNAL)

    def stop(self, id: int, grace_s: float) -> None:
        is_started = self._processes.pid(id) is not None
        self._pending_kills[id] = time.monotonic() + (grace_s if is_started else 0.0)
        self._processes.signal(id, signal.SIGTERM)

    def drop(self, id: int) -> None:
        """Kill a worker that is not needed any more. Another worker gets its number on this machine at once."""
        self._local_ranks.release(id)
        self._pending_kills[id] = time.monotonic()
        self._processes.signal(id, signal.SIGKILL)

    def reap(self) -> None:
        self._processes.reap()

    def idle_s(self, now: float) -> dict[int, float]:
        return self._idle_times.measure(self._processes.pids, now)

    def cancel_unstarted(self) -> None:
        self._processes.cancel_unstarted()

    def kill_all(self) -> None:
        self._processes.kill_all()

    def forget_workers(self) -> None:
        self._master_port.close()
        self._master_port = MasterPort()

    def keep(self, packet: packets.Packet) -> None:
        """If this process ends, so do its workers: there is nothing to keep packets for."""

    @property
    def next_at(self) -> float:
        """When ``on_time`` has something to do."""
        return min(self._pending_kills.values(), default=math.inf)

    def on_time(self, now: float, own_now: float, hang_timeout_s: float) -> None:
        """Kill what must be killed now. ``own_now``: the time without that in which this process was stopped (OwnClock)."""
        self._stdin.on_time()
        for id in [id for id, when in self._pending_kills.items() if when <= now and self._processes.pid(id) is not None]:
            self._pending_kills[id] = math.inf
            self._processes.signal(id, signal.SIGKILL)
        self._processes.kill_hung_zygote(own_now, hang_timeout_s)

    def close(self) -> None:
        """Kill and reap all descendants of this process."""
        self._processes.close()
        self._stdin.close()
        self._master_port.close()
        self._logs.close_all()

    # -- called by WorkerProcesses ----------------------------------------------------------------

    def on_packet(self, worker: int, packet: packets.Packet) -> None:
        trace = packet.get("traceback")
        if packet.get("type") == "failed" and isinstance(trace, str):
            self._logs.write(worker, 2, trace.encode(errors="replace"))
        self._observer.on_packet(worker, packet)

    def on_output(self, worker: int, stream: int, data: bytes) -> None:
        self._logs.write(worker, stream, data)
        self._observer.on_output(worker, stream, data)

    def on_exit(self, worker: int, pid: int, status: int) -> None:
        self._local_ranks.release(worker)
        self._pending_kills.pop(worker, None)
        last_lines = self._logs.tail(worker)
        self._logs.close(worker)
        self._observer.on_exit(worker, pid, status, last_lines)

    def on_stopped(self, worker: int, seconds: float | None) -> None:
        self._observer.on_stopped(worker, seconds)

    def on_zygote_hung(self, why: str) -> None:
        self._observer.on_zygote_hung(why)

    def on_not_started(self, workers: list[int], why: str, *, is_fatal: bool) -> None:
        for id in workers:
            self._logs.close(id)
            self._local_ranks.release(id)
            self._pending_kills.pop(id, None)
        self._observer.on_not_started(workers, why, is_fatal=is_fatal)
