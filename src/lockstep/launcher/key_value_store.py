"""KeyValueStore: the keys through which the members of one generation find each other. The agent serves it; it knows no torch.

A request is {"type": "store", "id", "generation", "op", "keys", ...}, its answer {"type": "stored", "id", "generation", "value"} or
"error" instead of "value". ``set`` has no answer. ``get`` and ``wait`` are answered when all their keys are there. When the next
generation is formed, all keys are dropped, and requests of earlier generations are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.launcher.packets import Packet

Send = Callable[[int, Packet], None]


@dataclass(frozen=True)
class _Wait:
    worker: int
    request: Packet


class KeyValueStore:
    """``send(worker, packet)`` sends an answer. Values are base64 text, which this class passes on unread."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._generation = -1
        self._values: dict[str, Any] = {}
        self._waits: list[_Wait] = []

    def begin(self, generation: int) -> None:
        """``generation`` is being formed: drop the keys of the one before."""
        waits, self._waits = self._waits, []
        self._generation, self._values = generation, {}
        for wait in waits:
            self._refuse(wait.worker, wait.request)

    def forget(self, worker: int) -> None:
        """The worker is gone: nothing waits for its answers."""
        self._waits = [wait for wait in self._waits if wait.worker != worker]

    def handle(self, worker: int, request: Packet) -> bool:
        """Do what a worker requests. Returns False if the request makes no sense."""
        op, keys = request.get("op"), request.get("keys")
        if not isinstance(op, str) or not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            return False
        if request.get("generation") != self._generation:
            self._refuse(worker, request)
        elif op in ("get", "wait"):
            self._waits.append(_Wait(worker, request))
            self._answer_waits(keys)
        elif op == "set" and len(keys) == 1 and isinstance(request.get("value"), str):
            self._set(keys[0], request["value"])
        elif op == "add" and len(keys) == 1 and isinstance(request.get("amount"), int):
            self._add(worker, request, keys[0])
        elif op == "check":
            self._answer(worker, request, all(key in self._values for key in keys))
        elif op == "delete" and len(keys) == 1:
            self._answer(worker, request, self._values.pop(keys[0], None) is not None)
        elif op == "count":
            self._answer(worker, request, len(self._values))
        else:
            return False
        return True

    def _set(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._answer_waits([key])

    def _add(self, worker: int, request: Packet, key: str) -> None:
        before = self._values.get(key, 0)
        if isinstance(before, str):
            self._answer(worker, request, None, error=f"the key {key} is not a number")
            return
        self._set(key, before + request["amount"])
        self._answer(worker, request, self._values[key])

    def _answer_waits(self, changed: list[str]) -> None:
        """Answer the waits for one of the ``changed`` keys whose keys are all there now."""
        ready = [
            wait
            for wait in self._waits
            if any(key in changed for key in wait.request["keys"]) and all(key in self._values for key in wait.request["keys"])
        ]
        self._waits = [wait for wait in self._waits if wait not in ready]
        for wait in ready:
            is_get = wait.request["op"] == "get"
            self._answer(wait.worker, wait.request, [self._values[key] for key in wait.request["keys"]] if is_get else True)

    def _answer(self, worker: int, request: Packet, value: Any, error: str | None = None) -> None:
        answer = {"type": "stored", "id": request.get("id"), "generation": request.get("generation")}
        self._send(worker, {**answer, "value": value} if error is None else {**answer, "error": error})

    def _refuse(self, worker: int, request: Packet) -> None:
        if request.get("op") != "set":
            self._answer(worker, request, None, error=f"generation {request.get('generation')} is over")
