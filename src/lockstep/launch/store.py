"""KeyStore: the keys and values at which the workers of a generation meet. Owns who waits for what; knows no sockets.

Clients connect to ``agent.sock`` in the run directory (a unix stream socket). Both ways, a message is a
frame: 4 bytes, big-endian, the length of what follows; then one JSON object in UTF-8. At most 16 MiB.

    request   {"op": ..., "prefix": generation (int), ...}    any request may carry "id": the reply repeats it
    reply     {"ok": true, "value": ...}    or    {"ok": false, "error": "a sentence", "kind": "timeout" | "over" | "request"}

    op            further fields                               value in the reply
    set           key, value                                   null
    get           key, timeout_s                               the value; waits until the key is there
    add           key, amount (int)                            the sum (int); a missing key counts as 0
    check         keys: [key, ...]                             true if all are there
    wait          keys: [key, ...], timeout_s                  null; waits until all are there
    delete        key                                          true if it was there
    compare_set   key, expected, desired                       what the key holds now (see below)
    count         -                                            the number of keys under the prefix (int)

Values are bytes, written as hexadecimal text ("" is the empty value); keys are text. ``add`` keeps its sum as
decimal ASCII digits, so ``get`` after ``add`` gives b"3" (hex "33"), as torch's own stores do. ``compare_set``: the key
holds ``expected``, or is missing and ``expected`` is "": it becomes ``desired``, which is returned. Missing
otherwise: ``expected`` is returned. Else what it holds is returned.

A ``get`` or ``wait`` is answered the moment its keys are there, or with kind "timeout" after ``timeout_s``. Other
requests of the same connection are served meanwhile, so replies to several requests in flight may change
order: tell them apart by "id", or send one at a time. When generation g is formed, the keys of every
earlier one are dropped; who waits there, and every later request for them, gets kind "over".
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

Reply = dict[str, Any]


@dataclass(frozen=True)
class Waiting:
    client: Hashable
    request: dict[str, Any]
    generation: int
    keys: tuple[str, ...]
    deadline: float


class KeyStore:
    """Each call returns the replies it brings about: (client, reply) pairs, for this client or for those that waited."""

    def __init__(self) -> None:
        self.generation = 0
        self._values: dict[int, dict[str, bytes]] = {}
        self._waiting: list[Waiting] = []

    def handle(self, client: Hashable, request: dict[str, Any], now: float) -> list[tuple[Hashable, Reply]]:
        """Serve one request. A request that cannot be read is answered, never raised."""
        try:
            generation = _whole(request, "prefix")
            if generation < self.generation:
                return [(client, _over(request, generation, self.generation))]
            op = request.get("op")
            if op in ("get", "wait"):
                return self._wait(client, request, generation, now)
            return self._now(client, request, generation)
        except (KeyError, TypeError, ValueError) as error:
            return [(client, _refused(request, f"this request cannot be served ({error!r}): {request!r:.200}", "request"))]

    def form(self, generation: int) -> list[tuple[Hashable, Reply]]:
        """A generation begins: earlier ones are over."""
        self.generation = generation
        self._values = {g: values for g, values in self._values.items() if g >= generation}
        over = [w for w in self._waiting if w.generation < generation]
        self._waiting = [w for w in self._waiting if w.generation >= generation]
        return [(w.client, _over(w.request, w.generation, generation)) for w in over]

    def expire(self, now: float) -> list[tuple[Hashable, Reply]]:
        """Answer those that have waited long enough, naming what never came."""
        late = [w for w in self._waiting if w.deadline <= now]
        self._waiting = [w for w in self._waiting if w.deadline > now]
        replies: list[tuple[Hashable, Reply]] = []
        for w in late:
            missing = [key for key in w.keys if key not in self._values.get(w.generation, {})]
            text = f"nobody set {', '.join(missing)} of generation {w.generation} within {w.request['timeout_s']} s"
            replies.append((w.client, _refused(w.request, text, "timeout")))
        return replies

    def next_deadline(self) -> float | None:
        return min((w.deadline for w in self._waiting), default=None)

    def forget(self, client: Hashable) -> None:
        """A connection is gone, and with it what it waited for."""
        self._waiting = [w for w in self._waiting if w.client != client]

    def _wait(self, client: Hashable, request: dict[str, Any], generation: int, now: float) -> list[tuple[Hashable, Reply]]:
        keys = (_text(request, "key"),) if request["op"] == "get" else _texts(request, "keys")
        waiting = Waiting(client, request, generation, keys, now + float(request["timeout_s"]))
        if self._there(waiting):
            return [(client, self._found(waiting))]
        self._waiting.append(waiting)
        return []

    def _now(self, client: Hashable, request: dict[str, Any], generation: int) -> list[tuple[Hashable, Reply]]:
        values = self._values.setdefault(generation, {})
        value: Any = None
        match request.get("op"):
            case "set":
                values[_text(request, "key")] = bytes.fromhex(request["value"])
            case "add":
                key = _text(request, "key")
                value = int(values.get(key, b"0")) + _whole(request, "amount")
                values[key] = str(value).encode()
            case "check":
                value = all(key in values for key in _texts(request, "keys"))
            case "delete":
                value = values.pop(_text(request, "key"), None) is not None
            case "compare_set":
                key, expected, desired = (
                    _text(request, "key"),
                    bytes.fromhex(request["expected"]),
                    bytes.fromhex(request["desired"]),
                )
                if values.get(key, b"" if not expected else None) == expected:
                    values[key] = desired
                value = values.get(key, expected).hex()
            case "count":
                value = len(values)
            case other:
                raise ValueError(f"no op {other!r}")
        return [(client, _granted(request, value)), *self._released(generation)]

    def _released(self, generation: int) -> list[tuple[Hashable, Reply]]:
        done = [w for w in self._waiting if w.generation == generation and self._there(w)]
        self._waiting = [w for w in self._waiting if w not in done]
        return [(w.client, self._found(w)) for w in done]

    def _there(self, waiting: Waiting) -> bool:
        values = self._values.get(waiting.generation, {})
        return all(key in values for key in waiting.keys)

    def _found(self, waiting: Waiting) -> Reply:
        value = self._values[waiting.generation][waiting.keys[0]].hex() if waiting.request["op"] == "get" else None
        return _granted(waiting.request, value)


def _granted(request: dict[str, Any], value: Any) -> Reply:
    return _with_id(request, {"ok": True, "value": value})


def _refused(request: dict[str, Any], error: str, kind: str) -> Reply:
    return _with_id(request, {"ok": False, "error": error, "kind": kind})


def _over(request: dict[str, Any], generation: int, current: int) -> Reply:
    return _refused(request, f"generation {generation} is over: generation {current} has been formed", "over")


def _with_id(request: dict[str, Any], reply: Reply) -> Reply:
    return {**reply, "id": request["id"]} if "id" in request else reply


def _text(request: dict[str, Any], field: str) -> str:
    value = request[field]
    if not isinstance(value, str):
        raise TypeError(f"{field} must be text")
    return value


def _texts(request: dict[str, Any], field: str) -> tuple[str, ...]:
    values = request[field]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{field} must be a list of texts")
    return tuple(values)


def _whole(request: dict[str, Any], field: str) -> int:
    value = request[field]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field} must be a whole number")
    return value
