"""The zygote: a process that imports torch once and forks workers that have it already. Does not know what a worker does.

Hand-written, because multiprocessing's forkserver is the parent of what it forks: if it dies, the agent cannot see how workers end.

Started by the agent as ``python -P -m lockstep.launcher.zygote FD AGENT_PID``. Packets on FD:

    agent -> zygote   {"type": "prepare", "preload": [...], "entrypoint": {...}, "restored_env": {...}}   once, first
                      {"type": "fork", "workers": [{"id", "env", "threads"}, ...]}   with the Descriptors of each worker
    zygote -> agent   {"type": "forked", "worker": id, "pid": pid}                   the worker is about to become the agent's child
                      {"type": "not forked", "workers": [id, ...], "error": text}    those of them that were not "forked" before
                      {"type": "unusable", "error": "a sentence"}                    a module cannot be imported, or starts threads

A fork: zygote -> intermediate process -> workers. The intermediate process exits, and the agent, which adopts
orphans, becomes the parent of the workers: it sees how they end, and they outlive the zygote.
A process that has threads is never forked: a lock that another thread holds would stay locked in the child.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from lockstep.launcher import packets
from lockstep.launcher.linux import die_with_parent, threads
from lockstep.launcher.worker import Descriptors, Entrypoint, WorkerSpec, become_worker, exit_process, run_as_main, run_worker

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it: more than a second in every worker
    "lockstep.training.run",
    "lockstep.replicas.ddp",
)


def main() -> None:
    connection, agent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(agent_pid)
    prepare = packets.receive(connection)
    if prepare is None:
        return
    entrypoint = Entrypoint(**{**prepare["entrypoint"], "args": tuple(prepare["entrypoint"]["args"])})
    error = _import_all(prepare["preload"], entrypoint.sys_path_0)
    if error is not None:
        packets.send(connection, {"type": "unusable", "error": error})
        return
    serve(connection, agent_pid, functools.partial(run_as_main, entrypoint), prepare["restored_env"])


def serve(connection: socket.socket, agent_pid: int, execute: Callable[[], None], restored_env: dict[str, str | None]) -> None:
    """Fork workers that call ``execute``, as requested until the agent closes its end. Then returns; never returns in a worker.

    ``restored_env``: the variables that were changed for this process. It should have one thread, because a lock that another
    thread holds stays locked in a fork. In a fork of the user's interpreter, libraries may start their threads again (OpenTelemetry
    does so, which W&B uses): these libraries expect to be forked.
    """
    forked = _serve(connection, agent_pid)
    if forked is not None:
        spec, descriptors = forked
        gc.enable()
        exit_process(run_worker(execute, spec, restored_env, descriptors.agent))


def _import_all(preload: list[str], sys_path_0: str) -> str | None:
    """Import what workers need; returns what went wrong, or None. Imports make no garbage, so the collector is off."""
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    sys.path.insert(0, sys_path_0)  # only now: a file next to the script may have the name of a module above
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - sent to the agent, which ends the run with it
            return (
                f"--preload {name} cannot be imported: {type(error).__name__}: {error}. "
                f"`python -c 'import {name}'` shows the traceback. Correct the module, or leave it out of --preload."
            )
        if threads() > 1:
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread()) or "of a native library"
            return (
                f"--preload {name} cannot be used: importing it starts threads ({names}), and a process with threads "
                "cannot be forked safely. Leave the module out of --preload: the script itself may import it."
            )
    return None


def _serve(connection: socket.socket, agent_pid: int) -> tuple[WorkerSpec, Descriptors] | None:
    """Fork as requested until the agent closes its end; then returns None in the zygote. Also returns in each forked worker."""
    while True:
        request, descriptors = packets.receive_with_descriptors(connection)
        if request is None:
            return None
        workers = request["workers"]
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()
        try:
            intermediate = os.fork()
        except OSError as error:
            _report_not_forked(connection, workers, str(error))
            intermediate = -1
        if intermediate == 0:
            spec, own = _fork_each(connection, workers, descriptors)
            connection.close()
            become_worker(spec, own, agent_pid)
            return spec, own
        for descriptor in descriptors:
            os.close(descriptor)
        if intermediate > 0 and os.waitpid(intermediate, 0)[1] != 0:
            _report_not_forked(connection, workers, "the process that forks workers ended early")


def _fork_each(connection: socket.socket, workers: list[dict[str, Any]], descriptors: list[int]) -> tuple[WorkerSpec, Descriptors]:
    """Runs in the intermediate process, which exits here. Returns in each worker."""
    for index, worker in enumerate(workers):
        count = len(Descriptors._fields)
        own = Descriptors(*descriptors[count * index : count * (index + 1)])
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            for descriptor in set(descriptors) - set(own):
                os.close(descriptor)
            return WorkerSpec(**worker), own
        packets.send(connection, {"type": "forked", "worker": worker["id"], "pid": pid})
    os._exit(0)


def _report_not_forked(connection: socket.socket, workers: list[dict[str, Any]], error: str) -> None:
    packets.send(connection, {"type": "not forked", "workers": [worker["id"] for worker in workers], "error": error})


if __name__ == "__main__":
    main()
