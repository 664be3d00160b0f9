"""Survey: starts the doctor's process on every machine (machine_probe.py), gives it orders, and collects what it says, in time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.machine_facts import Facts

HELLO_S = 9.0
"""After this time, machines that have not said anything are left out."""
END_S = 17.0
_LEAVE_S = 2.0
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbeStart:
    """A command that starts the doctor's process on one or more machines. ``explain(last line, code)``: why it has failed."""

    machines: tuple[str, ...]
    command: tuple[str, ...]
    explain: Callable[[str, int], str]
    has_workers: bool = True


@dataclass(frozen=True)
class FoundLink:
    """What a machine has found of its way ``to`` another (links.py: Link)."""

    to: str
    reached_at: str
    failures: str
    latency_s: float
    clock_offset_s: float
    bytes_per_s: float


@dataclass
class Report:
    """What is known of one machine. Empty or None is what it has not said."""

    machine: str
    has_workers: bool = True
    failure: str = ""
    """Why the process on the machine has said nothing."""
    facts: Facts | None = None
    torch: Facts | None = None
    links: dict[str, FoundLink] = field(default_factory=dict)
    has_links: bool = False
    """Whether the links to all other machines have been tried."""
    checkpoint: str | None = None
    """Why the checkpoint place cannot be written; "" if it can."""
    unseen: list[str] | None = None
    """The machines whose files in the checkpoint place cannot be read."""
    hello: dict[str, Any] = field(default_factory=dict)


class Survey:
    """``take`` starts the processes, and returns a report for each machine when all is known, or when the time is over."""

    def __init__(self, starts: Sequence[ProbeStart], token: str, *, wants_checkpoint: bool) -> None:
        self._token, self._wants_checkpoint = token, wants_checkpoint
        self.reports = {name: Report(name, start.has_workers) for start in starts for name in start.machines}
        self._selector = selectors.DefaultSelector()
        self._processes = [_Process(start, self._selector, self._on_line) for start in starts]
        self._numbers: list[str] = []
        """The machines that were told to probe, in the order of their numbers."""
        self._is_read = False

    def take(self) -> list[Report]:
        began = time.monotonic()
        for process in self._processes:
            process.send(self._token)
        while time.monotonic() - began < END_S and not self._is_complete():
            for key, _ in self._selector.select(0.05):
                key.data()
            for process in self._processes:
                self._note_failure(process)
            if not self._numbers and (self._have_all(lambda report: bool(report.hello)) or time.monotonic() - began > HELLO_S):
                self._order_probes()
            if self._numbers and self._wants_checkpoint and not self._is_read and self._have_all(_has_written, only_workers=True):
                self._is_read = True
                written = [number for number, name in enumerate(self._numbers) if self.reports[name].checkpoint == ""]
                self._order({"order": "read", "numbers": written})
        for report in self.reports.values():
            if not report.hello and not report.failure:
                report.failure = f"{report.machine} has not answered within {HELLO_S:g} s"
        self._end()
        return list(self.reports.values())

    def _alive(self) -> list[Report]:
        """The machines from which more can be expected."""
        return [report for report in self.reports.values() if not report.failure and (report.hello or not self._numbers)]

    def _have_all(self, has_said: Callable[[Report], bool], *, only_workers: bool = False) -> bool:
        return all(has_said(report) for report in self._alive() if report.has_workers or not only_workers)

    def _is_complete(self) -> bool:
        if not self._numbers:
            return not self._alive()
        has_links = self._have_all(lambda report: report.has_links)
        has_torch = self._have_all(lambda report: report.torch is not None, only_workers=True)
        return has_links and has_torch and (not self._wants_checkpoint or self._have_all(_has_unseen, only_workers=True))

    def _order_probes(self) -> None:
        self._numbers = [report.machine for report in self._alive() if report.hello]
        machines = [{"name": name, **self.reports[name].hello} for name in self._numbers]
        if machines:
            self._order({"order": "probe", "run": uuid.uuid4().hex[:12], "machines": machines})

    def _order(self, order: dict[str, Any]) -> None:
        for process in self._processes:
            process.send(json.dumps(order))

    def _on_line(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            report = self.reports[said["machine"]]
        except (ValueError, KeyError, TypeError):
            return  # a greeting of the machine's shell
        match said["event"]:
            case "hello":
                report.hello = {key: said[key] for key in ("id", "hosts", "port")}
                report.facts = said["facts"]
            case "torch":
                report.torch = said["torch"]
            case "link":
                report.links[said["link"]["to"]] = FoundLink(**said["link"])
            case "linked":
                report.has_links = True
            case "written":
                report.checkpoint = said["why"]
            case "unseen":
                report.unseen = [self._numbers[number] for number in said["numbers"]]

    def _note_failure(self, process: _Process) -> None:
        code = process.exit_code()
        if code is not None:
            for name in process.start.machines:
                if not self.reports[name].hello:
                    self.reports[name].failure = process.start.explain(process.last_line, code)

    def _end(self) -> None:
        for process in self._processes:
            process.close_stdin()
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and any(process.exit_code() is None for process in self._processes):
            for key, _ in self._selector.select(0.05):
                key.data()
        for process in self._processes:
            process.close()


def _has_written(report: Report) -> bool:
    return report.checkpoint is not None


def _has_unseen(report: Report) -> bool:
    return report.unseen is not None


class _Process:
    """One command, with pipes. ``on_line`` gets the lines of its standard output."""

    def __init__(self, start: ProbeStart, selector: selectors.BaseSelector, on_line: Callable[[bytes], None]) -> None:
        self.start, self._selector, self._on_line = start, selector, on_line
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(start.command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._unread = {1: b"", 2: b""}
        self.last_line = ""
        """Of the standard error."""
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, lambda number=number, stream=stream: self._read(number, stream))

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except (OSError, ValueError):
            pass  # it has ended

    def exit_code(self) -> int | None:
        """Returns None while it runs, or while its last words have not been read."""
        code = self._process.poll()
        streams = (self._process.stdout, self._process.stderr)
        return code if code is not None and all(stream is None or stream.closed for stream in streams) else None

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            if not stream.closed:
                self._selector.unregister(stream)
                stream.close()

    def _read(self, number: int, stream: Any) -> None:
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, self._unread[number] = (self._unread[number] + (data or b"\n")).split(b"\n")
        self._unread[number] = self._unread[number][-_MAX_LINE_BYTES:]
        for line in filter(None, lines):
            if number == 1:
                self._on_line(line)
            else:
                self.last_line = line.decode(errors="replace").strip()
        if not data:
            self._selector.unregister(stream)
            stream.close()
