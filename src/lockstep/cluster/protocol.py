"""The messages between a head and its agents: which there are, and which fields they have. Sends nothing.

agent                                     head
register (room, address, report)  ------>
                                  <------ registered, or refused
                                  <------ probe (the addresses of other machines)
probed (which cannot be reached)  ------>
                                  <------ running (the head decides for the run, and this machine belongs to it)
                                  <------ spawn, send, signal, stop, kill hung, drop
packet, started, exited, output   ------>
heartbeat                         <-----> heartbeat
                                  <------ end (the exit code)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.cluster.messages import Table
from lockstep.launcher.environment import Placement, RunSettings
from lockstep.plan.membership_recovery import MachineReport, WorkerReport

VERSION = 1
HEARTBEATS = 4
"""Per heartbeat timeout."""

FROM_AGENT: Table = {
    "register": {
        "version": int,
        "lockstep": str,
        "run_id": str,
        "machine": str,
        "host": str,
        "folder": str,
        "command": str,
        "room": int,
        "threads": int,
        "address": str,
        "probe_port": int,
        "master_ports": list[int],
        "head_index": int,
        "heads": int,
        "report": dict,
        "kept": int,
    },
    "packet": {"worker": int, "packet": dict},
    "started": {"worker": int, "pid": int},
    "exited": {"worker": int, "pid": int, "status": int, "last_lines": str},
    "stopped": {"worker": int, "seconds": float | None},
    "not started": {"workers": list[int], "why": str, "is_fatal": bool},
    "output": {"worker": int, "stream": int, "data": str},
    "notice": {"text": str},
    "idle": {"idle_s": dict[str, float]},
    "probed": {"unreachable": dict[str, str], "reached": list[str]},
    "kept": {"packet": dict},
    "leaving": {"why": str},
    "heartbeat": {},
}

FROM_HEAD: Table = {
    "registered": {"heartbeat_timeout_s": float, "hang_timeout_s": float},
    "running": {"run_id": str, "send_kept": bool},
    "refused": {"why": str},
    "probe": {"machines": dict[str, str]},
    "spawn": {"settings": dict, "places": dict[str, Any]},
    "send": {"workers": list[int], "packet": dict},
    "signal": {"worker": int, "number": int},
    "stop": {"worker": int, "grace_s": float},
    "kill hung": {"worker": int},
    "drop": {"workers": list[int]},
    "kill all": {},
    "cancel unstarted": {},
    "forget workers": {},
    "watch idle": {},
    "keep": {"packet": dict},
    "end": {"code": int, "why": str},
    "heartbeat": {},
}


@dataclass(frozen=True)
class Registration:
    """What an agent tells a head about its machine. ``room``: how many workers it starts."""

    run_id: str
    """Of the run that it belongs to; empty if it belongs to none yet."""
    machine: str
    host: str
    folder: str
    command: str
    room: int
    threads: int
    address: str
    probe_port: int
    master_ports: tuple[int, ...]
    head_index: int
    """The place of this head in the agent's list of heads."""
    heads: int
    """How many heads the agent knows."""
    report: MachineReport
    kept: int
    """How many packets it keeps for a new head."""


def registration_of(message: dict[str, Any]) -> Registration:
    """Raises TypeError or ValueError if the report in the message makes no sense."""
    given = {field.name: message[field.name] for field in fields(Registration)}
    report = dict(given["report"])
    report["workers"] = tuple(WorkerReport(**each) for each in report.get("workers", ()))
    report["members"] = tuple(int(id) for id in report.get("members", ()))
    given["report"] = MachineReport(**report)
    for worker in given["report"].workers:
        if not isinstance(worker.id, int):
            raise TypeError("a worker's number is not a number")
    given["master_ports"] = tuple(given["master_ports"])
    return Registration(**given)


def spawn_message(settings: RunSettings, places: dict[int, Placement]) -> dict[str, Any]:
    return {"type": "spawn", "settings": asdict(settings), "places": {str(id): asdict(place) for id, place in places.items()}}


def spawn_order(message: dict[str, Any]) -> tuple[RunSettings, dict[int, Placement]]:
    """Raises TypeError or ValueError if the message makes no sense."""
    return RunSettings(**message["settings"]), {int(id): Placement(**place) for id, place in message["places"].items()}
