"""AgentStore: the key-value store of one generation, served by the agent over this worker's own socket.

It opens no port and no file: a full disk, a removed run folder or a worker that is stopped in the middle of a request cannot hold
up the others. Knows no comm and no worker.
"""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lockstep.comm.agent_socket import agent_socket
from lockstep.comm.store import AbortableStore, StoreTimeoutError, StoreWaitError

NO_GENERATION = -1
"""The number by which the agent knows the store of workers that belong to no generation."""


class _Request:
    """A request that has not been answered."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.value: Any = None
        self.error: str | None = None


class AgentStore(AbortableStore):
    """The keys of ``generation``. Any thread may call any method.

    ``send(**packet)`` sends a request to the agent. The thread that reads the agent's packets passes the answers to ``answer``. A
    wait ends when the agent has the key, when ``abort`` is called, or after ``timeout_s``. C++ does not keep this object alive: the
    caller must.

    Raises:
        StoreTimeoutError: From every method that waits: nobody set the key in time. The message names the key.
        StoreWaitError: The generation was aborted or is over.
    """

    def __init__(self, send: Callable[..., object], generation: int, timeout_s: float) -> None:
        super().__init__()
        self._send, self._generation, self._timeout_s = send, generation, timeout_s
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Lock()
        self._aborted: str | None = None
        self._callbacks: list[Callable[[], None]] = []

    # -- called by the thread that reads the agent's packets --------------------------------------

    def answer(self, packet: dict[str, Any]) -> None:
        """Pass on the answer to a request. An answer that comes too late is dropped."""
        with self._lock:
            request = self._requests.pop(packet["id"], None)
        if request is not None:
            request.value, request.error = packet.get("value"), packet.get("error")
            request.answered.set()

    def abort(self, why: str) -> None:
        """End all waits, now and later. Any thread may call it, and twice."""
        with self._lock:
            self._aborted = self._aborted or why
            requests, self._requests = list(self._requests.values()), {}
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        for request in requests:
            request.error = why
            request.answered.set()

    def on_abort(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._aborted is None:
                self._callbacks.append(callback)
                return
        callback()

    # -- what torch calls -------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._send(
            type="store", op="set", generation=self._generation, keys=[key], value=base64.b64encode(data).decode()
        )  # packets arrive in order, so nothing needs to wait for an answer

    def get(self, key: str) -> bytes:
        (value,) = self._ask("get", [key], self._timeout_s)
        return base64.b64decode(value) if isinstance(value, str) else str(value).encode()  # torch reads sums as text

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], self._timeout_s, amount=amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys, self._timeout_s))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key], self._timeout_s))

    def num_keys(self) -> int:
        return int(self._ask("count", [], self._timeout_s))

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which C++ calls them

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> AgentStore:
        return self  # threads may share it

    def _ask(self, op: str, keys: list[str], timeout_s: float, **more: object) -> Any:
        request, number = _Request(), next(self._numbers)
        with self._lock:
            if self._aborted is not None:
                raise StoreWaitError(self._aborted)
            self._requests[number] = request
        self._send(type="store", op=op, generation=self._generation, id=number, keys=keys, **more)
        if not request.answered.wait(timeout_s):
            with self._lock:
                self._requests.pop(number, None)
            what = (
                f"no worker set {', '.join(keys)}"
                if op in ("get", "wait")
                else f"the agent did not answer ({op} {', '.join(keys)})"
            )
            raise StoreTimeoutError(f"{what} within {timeout_s:g} s")
        if request.error is not None:
            raise StoreWaitError(request.error)
        return request.value


def open_agent_store(fd: int, timeout_s: float) -> AgentStore:
    """The store of workers that belong to no generation: those of a script without ``lockstep.Run``."""
    agent = agent_socket(fd)
    store = AgentStore(agent.send, NO_GENERATION, timeout_s)
    agent.listen(lambda packet: store.answer(packet) if _answers(packet) else None)  # this also keeps the store alive
    return store


def _answers(packet: dict[str, Any]) -> bool:
    return bool(packet["type"] == "stored" and packet["generation"] == NO_GENERATION)
