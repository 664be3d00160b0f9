"""What can be asked of a run through its control socket: `lockstep scale`, `lockstep status`, `lockstep stop` and others."""

from __future__ import annotations

from typing import Protocol

from lockstep.launcher.packets import Packet


class Controlled(Protocol):
    """A run, as far as requests reach it."""

    @property
    def is_ending(self) -> bool: ...

    @property
    def room(self) -> int | None:
        """How many workers its machines have room for; None: as many as one likes."""

    def status(self, request: Packet) -> Packet: ...

    def scale(self, size: int) -> str:
        """Returns what membership says of it."""

    def stop(self, *, kill: bool) -> float:
        """Returns how many seconds the workers have to save."""


def answer(run: Controlled, request: Packet) -> Packet:
    """{"ok": True, "value": ...}, or {"ok": False, "error": a sentence}."""
    match request.get("type"):
        case "scale":
            return _scale(run, request.get("size"))
        case "status":
            return {"ok": True, "value": run.status(request)}
        case "stop":
            return {"ok": True, "value": {"grace_s": run.stop(kill=request.get("kill") is True)}}
    return _refused("the agent knows the requests {'type': 'scale', 'size': N}, {'type': 'status'} and {'type': 'stop'}")


def _scale(run: Controlled, size: object) -> Packet:
    if not isinstance(size, int) or size < 1:
        return _refused("{'type': 'scale', 'size': N} needs an N of at least 1")
    if run.is_ending:
        return _refused("the run is ending")
    if run.room is not None and size > run.room:
        why = f"the machines of the run have room for {run.room} workers"
        return _refused(f"{why}. Start `lockstep agent` on another machine to add more")
    return {"ok": True, "value": run.scale(size)}


def _refused(error: str) -> Packet:
    return {"ok": False, "error": error}
