"""RecordedResults: the results of the collectives between loops, which the agent keeps for newcomers. It does not read them.

Rank 0 sends each result once, cut into parts: {"type": "recorded", "index", "part", "parts", "data"}. A newcomer that passes the
same place in its script asks for it: {"type": "recall", "index"}. It gets the same parts as {"type": "recalled", ...}, as soon
as all of them are there.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.launch.packets import Packet

_MAX_CHARS = 64 << 20


class RecordedResults:
    """``send(worker, packet)`` sends a part. ``say(text)`` shows a sentence to the person who started the run."""

    def __init__(self, send: Callable[[int, Packet], None], say: Callable[[str], None], max_chars: int = _MAX_CHARS) -> None:
        self._send, self._say, self._max_chars = send, say, max_chars
        self._parts: dict[int, list[str]] = {}
        self._complete: set[int] = set()
        self._waiting: list[tuple[int, int]] = []  # (worker, index)
        self._chars = 0
        self._is_full = False

    def record(self, packet: Packet) -> list[int]:
        """Keep one part of a result. Returns the workers that wait for a result which is not kept, because there is no room."""
        index, part, parts, data = (packet.get(key) for key in ("index", "part", "parts", "data"))
        if not (isinstance(index, int) and isinstance(part, int) and isinstance(parts, int) and isinstance(data, str)):
            return []
        if index in self._complete or not 0 <= part < parts:
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
        if self._is_full and index not in self._complete:
            return False
        self._waiting.append((worker, index))
        if index in self._complete:
            self._answer(index)
        return True

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._waiting = [each for each in self._waiting if each[0] != worker]

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
