"""The workers of a run as rows of a table, for `lockstep top` and `lockstep status`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.commands.plain_text import size_text
from lockstep.recording.text import printable

_SILENT_S = 5.0
"""A worker that says nothing for so long is shown with that time. Workers speak twice a second."""


def worker_rows(live: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns headers and rows. ``live``: what an agent answers (launcher/live_status.py). "-": not known."""
    workers = live["workers"]
    has_hosts = len({worker["host"] for worker in workers}) > 1
    headers = ["RANK", "WORKER", "PID", *(["HOST"] if has_hosts else []), "STEP", "LANES", "PHASE", "MEMORY"]
    return headers, [_row(worker, live, has_hosts) for worker in workers]


def _row(worker: Mapping[str, Any], live: Mapping[str, Any], has_hosts: bool) -> list[str]:
    return [
        _text(worker["rank"]),
        str(worker["worker"]),
        _text(worker["pid"]),
        *([printable(worker["host"]) or "-"] if has_hosts else []),
        _text(worker.get("step") if worker["rank"] is not None else None),
        _lanes(worker.get("lanes") if worker["rank"] is not None else None),
        _phase(worker, live),
        size_text(worker["memory_bytes"]) if worker.get("memory_bytes") else "-",
    ]


def _phase(worker: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """What the worker does: its phase of the step, or what it is if it takes part in none."""
    if worker["is_spare"]:
        return "spare" if worker["status"] == "waiting" else f"spare ({worker['status']})"
    if worker["status"] != "member":
        return str(worker["status"])
    if worker.get("stopped_since") is not None:
        return f"stopped (SIGSTOP) {live['now'] - worker['stopped_since']:.0f} s"
    phase = str(worker.get("phase", "-"))
    since = worker.get("since")
    seconds = live["now"] - since if since is not None else 0.0
    if seconds >= 1.0:
        phase += f" {seconds:.0f} s"
    heard_s = worker.get("heard_s")
    return f"{phase}, silent for {heard_s:.0f} s" if heard_s is not None and heard_s >= _SILENT_S and "phase" in worker else phase


def _lanes(lanes: Any) -> str:
    """ "0-3": the first and the last of them."""
    if not lanes:
        return "-"
    first, end = lanes
    return "none" if end <= first else str(first) if end == first + 1 else f"{first}-{end - 1}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
