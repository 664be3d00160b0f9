"""Many agents: connections to a head that register and answer as agents with one worker each do. No torch, no workers.

    with ManyAgents(address, token_file, 1000, processes=4) as agents:
        agents.wait("ready", 30.0)          # the processes have started
        agents.connect()
        agents.wait("formed", 30.0)         # seconds from connect() to the last agent that was told of the first generation
        agents.lose_one()
        agents.wait("told", 30.0)           # seconds from the death of a worker to the last agent that was told of it

`python -m tests.many_agents HOST:PORT TOKEN_FILE FIRST COUNT` is one of the processes: it reads commands and prints what happened,
with the clock of the machine.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lockstep
from lockstep.cluster import protocol
from lockstep.cluster.address import Address
from lockstep.cluster.channel import Channel, ChannelCallbacks
from lockstep.cluster.messages import Message
from lockstep.cluster.token import read_token
from lockstep.plan.membership_recovery import MachineReport
from tests.fork_server import ROOT

HEARTBEAT_S = 0.5


class SimulatedAgent:
    """One connection. ``note(what)`` is called when something has happened to it."""

    def __init__(self, number: int, address: Address, token: bytes, selector: selectors.BaseSelector, note: Any) -> None:
        self._number, self._address, self._token, self._selector, self._note = number, address, token, selector, note
        self._worker = -1
        self._is_running = False
        self._connect()

    def _connect(self) -> None:
        callbacks = ChannelCallbacks(self._on_open, self._on_message, self._on_closed)
        self.channel = Channel.client(self._address, self._token, "agent", self._selector, callbacks, protocol.FROM_HEAD)

    def _on_open(self, channel: Channel) -> None:
        channel.send(
            {
                "type": "register",
                "version": protocol.VERSION,
                "lockstep": lockstep.__version__,
                "run_id": "",
                "machine": f"machine-{self._number}",
                "host": f"host-{self._number}",
                "folder": "/nowhere",
                "command": "train.py",
                "room": 1,
                "threads": 1,
                "address": f"10.1.{self._number // 250}.{self._number % 250 + 1}",
                "probe_port": 1,
                "master_ports": [1],
                "head_index": 0,
                "heads": 1,
                "report": asdict(MachineReport(1)),
                "kept": 0,
            }
        )

    def _on_message(self, channel: Channel, message: Message) -> None:
        kind = message["type"]
        if kind == "probe":
            channel.send({"type": "probed", "reached": list(message["machines"]), "unreachable": {}})
        elif kind == "running":
            self._is_running = True
            self._note("running")
        elif kind == "spawn":
            (self._worker,) = map(int, message["places"])
            channel.send({"type": "started", "worker": self._worker, "pid": 1000 + self._worker})
            channel.send({"type": "packet", "worker": self._worker, "packet": {"type": "join", "most": 0}})
        elif kind == "send":
            packet = message["packet"]
            if packet["type"] == "generation":
                self._note("formed", len(packet["members"]))
            elif packet["type"] == "abort":
                self._note("told")
                step = {"type": "ready", "generation": packet["generation"], "step": 0}
                channel.send({"type": "packet", "worker": self._worker, "packet": step})

    def die(self) -> None:
        exited = {"type": "exited", "worker": self._worker, "pid": 1000 + self._worker, "status": -9, "last_lines": ""}
        self.channel.send(exited)

    def _on_closed(self, channel: Channel, why: str) -> None:
        if self._is_running:
            self._note("closed", why)
        else:  # too many agents connect at the same time
            self._connect()


def main(address: str, token_file: str, first: int, count: int) -> None:
    token = read_token(token_file, {})
    selector = selectors.DefaultSelector()
    agents: list[SimulatedAgent] = []
    notes: dict[str, int] = {}

    def note(what: str, detail: Any = None) -> None:
        notes[what] = notes.get(what, 0) + 1
        if what == "closed" or notes[what] % count == 0 or (what == "told" and notes[what] >= count - 1):
            print(json.dumps([what, notes[what], time.monotonic(), detail]), flush=True)

    def command() -> None:
        line = sys.stdin.readline().strip()
        if line == "connect":
            agents.extend(SimulatedAgent(first + n, Address.parse(address), token, selector, note) for n in range(count))
        elif line == "die":
            agents[-1].die()
            print(json.dumps(["died", 1, time.monotonic(), None]), flush=True)
        else:
            raise SystemExit

    selector.register(sys.stdin, selectors.EVENT_READ, command)
    print(json.dumps(["ready", count, time.monotonic(), None]), flush=True)
    beat_at = 0.0
    while True:
        for key, _ in selector.select(0.1):
            key.data()
        now = time.monotonic()
        if now >= beat_at:
            beat_at = now + HEARTBEAT_S
            for agent in agents:
                agent.channel.on_time(now)
                if agent.channel.is_open:
                    agent.channel.send({"type": "heartbeat"})


class ManyAgents:
    def __init__(self, address: str, token_file: Path, count: int, processes: int) -> None:
        self.count, self._share = count, count // processes
        assert self._share * processes == count
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        base = [sys.executable, "-P", "-m", "tests.many_agents", address, str(token_file)]
        self._processes = [
            subprocess.Popen(
                [*base, str(n * self._share), str(self._share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for n in range(processes)
        ]
        self._begin = 0.0
        self._seen: list[list[list[Any]]] = [[] for _ in self._processes]
        self._partial = [b""] * processes  # the beginning of a line
        self._selector = selectors.DefaultSelector()
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, number)

    def __enter__(self) -> ManyAgents:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def connect(self) -> None:
        for process in self._processes:
            self._command(process, "connect")
        self._begin = time.monotonic()

    def lose_one(self) -> None:
        """The worker of one agent dies."""
        self._command(self._processes[-1], "die")

    def wait(self, what: str, deadline_s: float) -> float:
        """Wait until ``what`` has happened to all agents. Returns the seconds since ``connect``, or since the death."""
        end = time.monotonic() + deadline_s
        while (last := self._last(what)) is None:
            left_s = end - time.monotonic()
            assert left_s > 0, f"not within {deadline_s} s: {what}. So far: {[seen[-3:] for seen in self._seen]}"
            for key, _ in self._selector.select(left_s):
                data = os.read(key.fd, 1 << 16)
                assert data, "a process of agents has ended"
                *lines, self._partial[key.data] = (self._partial[key.data] + data).split(b"\n")
                self._seen[key.data] += map(json.loads, lines)
        closed = [entry for seen in self._seen for entry in seen if entry[0] == "closed"]
        assert not closed, closed[:3]
        begin = next((entry[2] for entry in self._seen[-1] if entry[0] == "died"), self._begin) if what == "told" else self._begin
        return last - begin

    def details(self, what: str) -> set[Any]:
        """What each process has noted with it."""
        return {entry[3] for seen in self._seen for entry in seen if entry[0] == what}

    def _last(self, what: str) -> float | None:
        """When ``what`` had happened to all agents; None if it has not. The worker that dies is not told of it."""
        times = []
        for number, seen in enumerate(self._seen):
            is_last = what == "told" and number == len(self._seen) - 1
            found = [at for kind, count, at, _ in seen if kind == what and count >= self._share - is_last]
            if not found:
                return None
            times.append(found[0])
        return max(times)

    def _command(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
