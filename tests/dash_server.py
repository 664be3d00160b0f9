"""A real `lockstep dash`: its process, its address, and what it answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fork_server import ROOT
from tests.waiting import wait_until


class DashServer:
    """Started in a folder of its own; ``url`` is the address that it has printed."""

    def __init__(self, folder: Path, *options: str, note: Path) -> None:
        self._note = note
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        with note.open("wb") as out:
            command = [sys.executable, "-m", "lockstep", "dash", str(folder), *options]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        wait_until(lambda: "/?token=" in self.said() or self.process.poll() is not None, "the address is printed")
        found = re.search(r"http://\S+:(\d+)/\?token=(\S+)", self.said())
        assert found is not None, self.said()
        self.url, self.port, self.token = found[0], int(found[1]), found[2]

    def said(self) -> str:
        return self._note.read_text()

    def ask(self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str, dict[str, str]]:
        """Send a request as it is. Returns status, body and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON at ``path``, asked for with the token."""
        status, body, _ = self.ask(path + ("&" if "?" in path else "?") + f"token={self.token}")
        assert status == 200, body
        return json.loads(body)

    def messages(self, query: str, count: int) -> list[dict[str, Any]]:
        """The first messages of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", f"/api/stream?{query}&token={self.token}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            found: list[dict[str, Any]] = []
            while len(found) < count:
                line = answer.readline()
                assert line, "the stream has ended"
                if line.startswith(b"data: "):
                    found.append(json.loads(line.removeprefix(b"data: ")))
            return found
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise


@contextmanager
def dash(folder: Path, *options: str, note: Path) -> Iterator[DashServer]:
    server = DashServer(folder, *options, note=note)
    try:
        yield server
    finally:
        server.end()
