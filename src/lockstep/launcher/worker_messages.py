"""Worker messages: what a packet from a worker means, as an event of plan/membership.py or as progress. Sends and decides nothing.

A script may write anything to the socket of its worker. A packet that makes no sense gives None.
"""

from __future__ import annotations

import math

from lockstep.launcher.packets import Packet
from lockstep.launcher.progress_text import Progress
from lockstep.plan import membership_events as events

_MAX_CHARS = 200
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


def event_of(worker: int, pid: int | None, packet: Packet) -> events.Event | None:
    """Returns the event that a packet of ``worker`` reports, or None."""
    try:
        match packet["type"]:
            case "join":
                stage, gpu = int(packet.get("stage", -1)), str(packet.get("gpu", ""))[:_MAX_CHARS]
                return events.JoinRequested(worker, int(packet.get("most", 0)), pid, stage, gpu)
            case "stage":
                return events.StageEntered(worker, int(packet["stage"]))
            case "ready":
                return events.Ready(worker, int(packet["generation"]), int(packet["step"]))
            case "lost":
                blamed = tuple(int(id) for id in packet["blamed"])
                return events.PeersLost(worker, int(packet["generation"]), blamed, bool(packet["hung"]), str(packet["why"]))
            case "alone":
                limit_s = float(packet["limit_s"])
                return events.AloneBegan(worker, str(packet["what"])[:_MAX_CHARS], limit_s) if 0 < limit_s < math.inf else None
            case "alone ended":
                return events.AloneEnded(worker)
            case "leaving":
                return events.LeaveRequested(worker)
            case "failed":
                return events.ScriptRaised(worker, int(packet["step"]), str(packet["error"]), str(packet.get("place", "")))
            case "rank read":
                return events.RankRead(worker, bool(packet.get("needs_peers", False)))
            case "finished":
                return events.ScriptFinished(worker, int(packet.get("step", -1)))
    except _MALFORMED:
        pass
    return None


def progress_of(packet: Packet) -> Progress | None:
    """Returns the progress that a packet reports, or None."""
    if packet.get("type") != "progress":
        return None
    try:
        values = {str(name): float(value) for name, value in packet.get("values", {}).items()}
        epoch, samples, total = (None if packet.get(key) is None else int(packet[key]) for key in ("epoch", "samples", "total"))
        step = int(packet["step"])
        return None if step < 0 or (total or 0) < 0 else Progress(step, epoch, values, samples=samples, total=total)
    except _MALFORMED:
        return None
