"""RecordedResults: what newcomers need of the run's past, which the agent keeps for them. It does not read the results.

Rank 0 sends each result once, cut into parts: {"type": "recorded", "index", "part", "parts", "data"}. A newcomer that passes the
same place in its script asks for it: {"type": "recall", "index"}. It gets the same parts as {"type": "recalled", ...}, as soon
as all of them are there.

Rank 0 also sends where the current epoch of each loop over ``run.epochs`` began: {"type": "epoch", "number", "epoch", ...}. A
newcomer at that loop asks for it: {"type": "latest epoch", "number"}, and needs no result of earlier epochs. These are dropped,
from "first" to "keep", unless a newcomer has begun with an earlier epoch and may still ask for them.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.launcher.packets import Packet

_MAX_CHARS = 64 << 20
_EPOCH_FIELDS = ("epoch", "stage", "result", "first", "keep", "is_exhausted", "is_left")


class RecordedResults:
    """``send(worker, packet)`` sends a part. ``say(text)`` shows a sentence to the person who started the run."""

    def __init__(self, send: Callable[[int, Packet], None], say: Callable[[str], None], max_chars: int = _MAX_CHARS) -> None:
        self._send, self._say, self._max_chars = send, say, max_chars
        self._parts: dict[int, list[str]] = {}
        self._complete: set[int] = set()
        self._waiting: list[tuple[int, int]] = []  # (worker, index)
        self._epochs: dict[int, dict[str, int]] = {}  # the latest of each loop over epochs
        self._readers: dict[int, int] = {}  # newcomer -> the first result that it may still ask for
        self._chars = 0
        self._is_full = False

    def record(self, packet: Packet) -> list[int]:
        """Keep one part of a result. Returns the workers that wait for a result which is not kept, because there is no room."""
        index, part, parts, data = (packet.get(key) for key in ("index", "part", "parts", "data"))
        if not (isinstance(index, int) and isinstance(part, int) and isinstance(parts, int) and isinstance(data, str)):
            return []
        if index in self._complete or self._is_dropped(index) or not 0 <= part < parts:
            return []  # another rank 0 has recorded it before
        if self._is_full or self._chars + len(data) > self._max_chars:
            return self._refuse()
        received = self._parts.setdefault(index, [])
        if part == 0:  # the rank 0 that began to send it may be lost
            self._chars -= sum(len(each) for each in received)
            received.clear()
        if part == len(received):
            received.append(data)
            self._chars += len(data)
        if len(received) == parts:
            self._complete.add(index)
            self._answer(index)
        return []

    def recall(self, worker: int, packet: Packet) -> bool:
        """Send the result to the worker, now or when it is complete. Returns False if it was not kept."""
        index = packet.get("index")
        if not isinstance(index, int):
            return True
        if (self._is_full or self._is_dropped(index)) and index not in self._complete:
            return False
        self._waiting.append((worker, index))
        if index in self._complete:
            self._answer(index)
        return True

    def begin_epoch(self, packet: Packet) -> None:
        """Keep where an epoch began, unless a later one is known, and drop what no newcomer can need any more."""
        number, fields = packet.get("number"), {field: packet.get(field) for field in _EPOCH_FIELDS}
        latest = {field: value for field, value in fields.items() if isinstance(value, int)}
        if not isinstance(number, int) or len(latest) < len(fields):
            return
        known = self._epochs.get(number)
        if known is None or (known["epoch"], known["is_left"]) < (latest["epoch"], latest["is_left"]):
            self._epochs[number] = latest
            self._drop()

    def latest_epoch(self, worker: int, packet: Packet) -> None:
        """Tell a newcomer where the current epoch of a loop began."""
        number = packet.get("number")
        if isinstance(number, int):
            latest = self._epochs.get(number)
            self._readers[worker] = max(self._readers.get(worker, 0), latest["result"] if latest is not None else 0)
            self._send(worker, {"type": "latest epoch", "number": number, "epoch": latest})

    def forget(self, worker: int) -> None:
        """The worker is gone, or has become a member: it asks for nothing any more."""
        self._waiting = [each for each in self._waiting if each[0] != worker]
        if self._readers.pop(worker, None) is not None:
            self._drop()

    def _drop(self) -> None:
        for index in [index for index in self._parts if self._is_dropped(index)]:
            self._chars -= sum(len(each) for each in self._parts.pop(index))
            self._complete.discard(index)

    def _is_dropped(self, index: int) -> bool:
        """Whether the result belongs to an epoch that is over, and no newcomer has begun with that epoch or an earlier one."""
        is_over = any(latest["first"] <= index < latest["keep"] for latest in self._epochs.values())
        return is_over and all(index < first for first in self._readers.values())

    def _answer(self, index: int) -> None:
        workers = [worker for worker, wanted in self._waiting if wanted == index]
        self._waiting = [each for each in self._waiting if each[1] != index]
        parts = self._parts[index]
        for worker in workers:
            for part, data in enumerate(parts):
                self._send(worker, {"type": "recalled", "index": index, "part": part, "parts": len(parts), "data": data})

    def _refuse(self) -> list[int]:
        if not self._is_full:
            self._is_full = True
            self._say(
                f"the results of evaluations and other collectives between loops take more than {self._max_chars >> 20} MB. "
                "Later ones are not kept, so a worker that dies from now on cannot be replaced. Training continues."
            )
        workers = [worker for worker, _ in self._waiting]
        self._waiting = []
        return workers
