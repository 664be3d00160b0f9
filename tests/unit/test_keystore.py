"""The agent's key store: what each request is answered, when, and to whom."""

from __future__ import annotations

import selectors
import socket
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import packets
from lockstep.launch.door import Door
from lockstep.launch.store import KeyStore


def ask(store: KeyStore, op: str, client: str = "a", prefix: int = 0, now: float = 0.0, **fields: Any) -> Any:
    """The reply to this client; None where it waits."""
    return dict(store.handle(client, {"op": op, "prefix": prefix, **fields}, now)).get(client)


def value(store: KeyStore, op: str, **fields: Any) -> Any:
    reply = ask(store, op, **fields)
    assert reply["ok"], reply
    return reply["value"]


def test_what_is_set_is_got() -> None:
    store = KeyStore()
    value(store, "set", key="k", value="00ff")
    assert value(store, "get", key="k", timeout_s=1) == "00ff"


def test_add_counts_and_is_kept_as_digits() -> None:
    store = KeyStore()
    assert value(store, "add", key="n", amount=2) == 2
    assert value(store, "add", key="n", amount=-5) == -3
    assert bytes.fromhex(value(store, "get", key="n", timeout_s=1)) == b"-3"


def test_check_delete_and_count() -> None:
    store = KeyStore()
    value(store, "set", key="a", value="")
    assert value(store, "check", keys=["a"]) is True
    assert value(store, "check", keys=["a", "b"]) is False
    assert value(store, "count") == 1
    assert value(store, "delete", key="a") is True
    assert value(store, "delete", key="a") is False
    assert value(store, "count") == 0


def test_compare_set_changes_only_what_is_as_expected() -> None:
    store = KeyStore()
    assert value(store, "compare_set", key="k", expected="01", desired="02") == "01"
    assert value(store, "check", keys=["k"]) is False
    assert value(store, "compare_set", key="k", expected="", desired="02") == "02"
    assert value(store, "compare_set", key="k", expected="01", desired="03") == "02"
    assert value(store, "compare_set", key="k", expected="02", desired="03") == "03"


def test_who_waits_is_answered_the_moment_all_keys_are_there() -> None:
    store = KeyStore()
    assert ask(store, "wait", "b", keys=["x", "y"], timeout_s=10) is None
    assert ask(store, "get", "c", key="y", timeout_s=10, id=7) is None
    assert store.handle("a", {"op": "set", "prefix": 0, "key": "x", "value": "01"}, 1.0) == [("a", {"ok": True, "value": None})]
    replies = dict(store.handle("a", {"op": "add", "prefix": 0, "key": "y", "amount": 1}, 1.0))
    assert replies["b"] == {"ok": True, "value": None}
    assert replies["c"] == {"ok": True, "value": b"1".hex(), "id": 7}


def test_a_wait_ends_at_its_timeout_and_names_what_is_missing() -> None:
    store = KeyStore()
    value(store, "set", key="x", value="")
    assert ask(store, "wait", "b", keys=["x", "y"], timeout_s=5, now=100.0) is None
    assert store.next_deadline() == 105.0
    assert store.expire(104.9) == []
    ((client, reply),) = store.expire(105.0)
    assert (client, reply["kind"]) == ("b", "timeout")
    assert reply["error"] == "nobody set y of generation 0 within 5 s"
    assert store.next_deadline() is None


def test_generations_do_not_see_each_other_and_end_when_a_later_one_is_formed() -> None:
    store = KeyStore()
    value(store, "set", key="k", value="01", prefix=3)
    assert value(store, "check", keys=["k"], prefix=4) is False
    assert ask(store, "get", "b", key="never", timeout_s=5, prefix=3) is None
    ((client, reply),) = store.form(4)
    assert (client, reply["kind"]) == ("b", "over")
    assert ask(store, "get", key="k", timeout_s=5, prefix=3)["kind"] == "over"
    assert value(store, "check", keys=["k"], prefix=4) is False


def test_a_client_that_is_gone_is_not_answered() -> None:
    store = KeyStore()
    ask(store, "get", "b", key="k", timeout_s=5)
    store.forget("b")
    assert len(store.handle("a", {"op": "set", "prefix": 0, "key": "k", "value": ""}, 0.0)) == 1


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "set"},
        {"op": "fly", "prefix": 0},
        {"op": "set", "prefix": 0, "key": 3, "value": ""},
        {"op": "set", "prefix": 0, "key": "k", "value": "xyz"},
        {"op": "get", "prefix": 0, "key": "k"},
        {"op": "wait", "prefix": 0, "keys": "k", "timeout_s": 1},
        {"op": "add", "prefix": "0", "key": "k", "amount": 1},
        {"op": "add", "prefix": 0, "key": "k", "amount": 1.5},
    ],
)
def test_a_request_that_makes_no_sense_is_answered(request_: dict[str, Any]) -> None:
    ((_, reply),) = KeyStore().handle("a", request_, 0.0)
    assert reply["kind"] == "request"


def test_add_to_what_is_no_number_is_answered() -> None:
    store = KeyStore()
    value(store, "set", key="k", value="ff")
    assert ask(store, "add", key="k", amount=1)["kind"] == "request"


def test_the_door_serves_many_and_survives_nonsense(tmp_path: Path) -> None:
    selector = selectors.DefaultSelector()
    address = str(tmp_path / "s")
    door = Door(address, selector, lambda request: {"ok": True, "value": request})

    def turn() -> None:
        for key, _ in selector.select(1.0):
            key.data()

    lines = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for line in lines:
        line.connect(address)
        line.settimeout(0.01)

    def read(line: socket.socket) -> packets.Packet:
        frames = packets.Frames()
        for _ in range(100):
            turn()
            try:
                found = frames.feed(line.recv(1 << 16))
            except TimeoutError:
                continue
            if found:
                return found[0]
        raise AssertionError("no answer")

    lines[0].sendall(packets.frame({"op": "get", "prefix": 0, "key": "k", "timeout_s": 10}))
    lines[2].sendall(b"\xff\xff\xff\xffnonsense")
    big = "ab" * 100_000
    data = packets.frame({"op": "set", "prefix": 0, "key": "k", "value": big})
    while data:  # more than a socket takes at once
        try:
            data = data[lines[1].send(data[:65536]) :]
        except TimeoutError:
            turn()
    assert read(lines[1])["ok"]
    assert read(lines[0])["value"] == big
    lines[0].sendall(packets.frame({"type": "hello"}))
    assert read(lines[0])["value"] == {"type": "hello"}
    assert lines[2].recv(10) == b""
    for line in lines:
        line.close()
    door.close()
    selector.close()
