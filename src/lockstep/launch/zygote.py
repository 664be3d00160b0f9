"""The zygote: imports torch once, and forks workers that have it already. Knows what to import, not what a worker does.

Started by the agent as ``python -P -m lockstep.launch.zygote FD AGENT_PID``. Packets on FD:

    agent -> zygote   {"type": "prepare", "preload": [...], "job": {...}}           once, first
                      {"type": "fork", "workers": [{"id", "env", "threads"}, ...]}   with three descriptors for each worker
    zygote -> agent   {"type": "ready"}                                              everything is imported
                      {"type": "forked", "worker": id, "pid": pid}                   it is about to become the agent's child
                      {"type": "unforked", "workers": [id, ...], "error": text}      of these, whoever was not "forked" will not be
                      {"type": "unusable", "error": "a sentence"}                    a module cannot be imported, or has threads

A fork: zygote -> a process in between -> workers. The one in between exits, and the agent, which adopts
orphans, becomes the workers' parent: it sees how they end, and they outlive the zygote.
A process that has threads is never forked: a lock that another thread holds would stay locked in the child.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import threading
from typing import Any

from lockstep.launch import packets
from lockstep.launch.linux import die_with_parent, threads
from lockstep.launch.worker import Job, WorkerSpec, become, leave, work

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it: more than a second in every worker
    "lockstep.training.run",
    "lockstep.replicas.ddp",
)


def main() -> None:
    line, agent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(agent)
    prepare, _ = packets.receive(line)
    if prepare is None:
        return
    job = Job(**{**prepare["job"], "args": tuple(prepare["job"]["args"])})
    trouble = _import_all(prepare["preload"], job.first_path)
    if trouble is not None:
        packets.send(line, {"type": "unusable", "error": trouble})
        return
    packets.send(line, {"type": "ready"})
    place = _serve(line, agent)
    if place is not None:
        gc.enable()
        leave(work(job, place))


def _import_all(preload: list[str], first_path: str) -> str | None:
    """Import what workers need; what went wrong, if something did. The collector only costs time while nothing becomes garbage."""
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    sys.path.insert(0, first_path)  # only now: a script's folder may hold a file named as one of ours
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - told to the agent, which ends the run with it
            return (
                f"--preload {name} cannot be imported: {type(error).__name__}: {error}. "
                f"Its traceback comes with `python -c 'import {name}'`; correct it, or leave the module out of --preload."
            )
        if threads() > 1:
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread()) or "of a native library"
            return (
                f"--preload {name} cannot be used: importing it starts threads ({names}), and a process with threads "
                "cannot be forked safely. Leave the module out of --preload: the script itself may import it."
            )
    return None


def _serve(line: socket.socket, agent: int) -> WorkerSpec | None:
    """Fork as asked until the agent closes its end. Returns in the zygote with None, and in each worker with its place."""
    while True:
        request, descriptors = packets.receive(line)
        if request is None:
            return None
        wanted = request["workers"]
        assert threading.active_count() == 1
        assert threads() == 1
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()
        try:
            between = os.fork()
        except OSError as error:
            _tell_unforked(line, wanted, str(error))
            between = -1
        if between == 0:
            place = _fork_each(line, wanted, descriptors)
            line.close()
            become(place, agent)
            return place
        for descriptor in descriptors:
            os.close(descriptor)
        if between > 0 and os.waitpid(between, 0)[1] != 0:
            _tell_unforked(line, wanted, "the process that forks workers ended early")


def _fork_each(line: socket.socket, wanted: list[dict[str, Any]], descriptors: list[int]) -> WorkerSpec:
    """In the process in between, which ends here. Returns in each worker."""
    for number, each in enumerate(wanted):
        mine = descriptors[3 * number : 3 * number + 3]
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            for descriptor in descriptors:
                if descriptor not in mine:
                    os.close(descriptor)
            return WorkerSpec(each["id"], each["env"], each["threads"], *mine)
        packets.send(line, {"type": "forked", "worker": each["id"], "pid": pid})
    os._exit(0)


def _tell_unforked(line: socket.socket, wanted: list[dict[str, Any]], error: str) -> None:
    packets.send(line, {"type": "unforked", "workers": [each["id"] for each in wanted], "error": error})


if __name__ == "__main__":
    main()
