"""The doctor's process on one machine: `lockstep doctor --serve NAME`. Its standard input and output belong to survey.py.

Lines in: the token; then JSON objects:

    {"order": "probe", "run": ..., "machines": [{"name", "id", "hosts", "port"}, ...]}    connect to them; write a checkpoint probe
    {"order": "read", "numbers": [...]}                                                   read the checkpoint probes of these

Lines out: JSON objects with "machine" and "event": "hello" at once, "torch" after its import, "link" for each other machine, then
"linked", "written" and "unseen". They are short, because srun may cut a long line in two.
The end of the standard input ends the process. All machines may get the same lines (srun).
"""

from __future__ import annotations

import ipaddress
import json
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.cluster.own_addresses import interface_address
from lockstep.doctor.checkpoint_probe import CheckpointProbe
from lockstep.doctor.links import Link, Links, Peer
from lockstep.doctor.machine_facts import own_facts, torch_facts
from lockstep.launcher.arguments import write

_TICK_S = 0.05
_TORCH_S = 15.0
_REMOVE_S = 3.0
_MAX_TEXT = 500


class MachineProbe:
    """``has_workers``: whether torch is looked at. ``place``: of the checkpoints, or None. Call ``run`` once."""

    def __init__(self, name: str, token: bytes, *, has_workers: bool, place: str | None) -> None:
        self._name, self._has_workers, self._place = name, has_workers, place
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._links = Links(token, self._id, self._selector, self._on_links)
        self._checkpoint: CheckpointProbe | None = None
        self._unread = b""
        self._is_over = False

    def run(self) -> None:
        """Serve until the standard input ends. Ends the process, because a thread may be stuck in a file system."""
        self._say("hello", id=self._id, hosts=own_hosts(), port=self._links.port, facts=own_facts())
        if self._has_workers:
            _in_thread(lambda: self._say("torch", torch=torch_facts(_TORCH_S)))
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._read)
        while not self._is_over:
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._links.on_time(time.monotonic())
        if self._checkpoint is not None:
            _in_thread(self._checkpoint.remove).join(_REMOVE_S)
        os._exit(0)

    def _read(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._is_over = True
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if order["order"] == "probe":
            self._probe(order["run"], order["machines"])
        else:
            checkpoint, numbers = self._checkpoint, order["numbers"]
            if checkpoint is not None:
                _in_thread(lambda: self._say("unseen", numbers=checkpoint.unseen(numbers)))

    def _probe(self, run: str, machines: list[dict[str, Any]]) -> None:
        number = [machine["id"] for machine in machines].index(self._id)
        if self._place is not None and self._has_workers:
            checkpoint = self._checkpoint = CheckpointProbe(self._place, run, number)
            _in_thread(lambda: self._say("written", why=checkpoint.write()))
        others = machines[number + 1 :] + machines[:number]  # each machine begins with another one
        self._links.connect([Peer(each["name"], each["id"], tuple(each["hosts"]), each["port"]) for each in others])

    def _on_links(self, links: list[Link]) -> None:
        for link in links:
            self._say("link", link={**asdict(link), "failures": "; ".join(dict.fromkeys(link.failures))[:_MAX_TEXT]})
        self._say("linked")

    def _say(self, event: str, **content: Any) -> None:
        line = json.dumps({"machine": self._name, "event": event, **content}) + "\n"
        with self._lock:
            os.set_blocking(1, True)
            write(1, line)


def own_hosts() -> list[str]:
    """Returns the addresses at which other machines may reach this one."""
    found = [address for _, name in socket.if_nameindex() if (address := interface_address(name)) is not None]
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    found += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines if line.split()[3] == "00"]
    return [each for each in found if not ipaddress.ip_address(each).is_loopback] or ["127.0.0.1"]


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
