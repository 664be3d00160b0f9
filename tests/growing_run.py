"""A made-up run that grows: a test says when it makes a step, loses a worker, or ends. No processes."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.recording import records
from lockstep.recording.records import Metrics
from lockstep.recording.writer import RecordingWriter
from tests.recordings import step_of


class GrowingRun:
    """Written to ``folder`` as the supervisor would. ``slow_rank`` loads its data slowly."""

    def __init__(self, folder: Path, workers: int = 4, *, slow_rank: int | None = None, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.members, self.step, self.slow_rank = folder, list(range(workers)), 0, slow_rank
        self.next_id, self.generation = workers, 0
        self._rng, self._loss = random.Random(seed), 3.0
        self._writer = RecordingWriter(folder / "recording")
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._folder, fcntl.LOCK_EX)  # as a process that supervises it would
        self.event("command", role="run", words=["train.py"], host=socket.gethostname(), pid=os.getpid())
        self.event("begin", settings={"size": workers}, pid=os.getpid())
        self._form()
        for id in self.members:
            self.log(id, f"worker {id} says hello\n")

    def event(self, kind: str, **facts: Any) -> None:
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind, **facts}) + "\n")

    def log(self, worker: int, text: str) -> None:
        path = self.folder / "workers" / str(worker) / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(text)

    def steps(self, count: int = 1, values: dict[str, float] | None = None) -> None:
        """Write so many steps, the last of which ends now."""
        own = [
            {records.DATA: self._rng.randint(800, 1200) + 30_000 * (rank == self.slow_rank)} for rank in range(len(self.members))
        ]
        slowest = 81_000 + max(each[records.DATA] for each in own)
        cuts = [16 * rank // len(self.members) for rank in range(len(self.members) + 1)]
        for back in range(count, 0, -1):
            self.step += 1
            at = time.time() - back * 0.09
            self._loss = 0.4 + (self._loss - 0.4) * 0.985 + self._rng.uniform(-0.02, 0.02)
            made = [
                step_of(
                    *(self.step, rank, len(self.members)),
                    at=at,
                    own_us=own[rank],
                    slowest_us=slowest,
                    lanes=(cuts[rank], cuts[rank + 1]),
                    generation=self.generation,
                    worker=id,
                ).to_json()
                for rank, id in enumerate(self.members)
            ]
            logged = values or {"loss": self._loss, "lr": 1e-3}
            self._writer.write([*made, Metrics(self.step, at, logged).to_json()])

    @contextmanager
    def going_on(self, every_s: float = 0.1) -> Iterator[None]:
        """While this context lasts, the run makes a step now and then."""
        over = threading.Event()

        def append() -> None:
            while not over.wait(every_s):
                self.steps(1)

        thread = threading.Thread(target=append)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(20)

    def kill(self, worker: int) -> None:
        self.event("exited", worker=worker, pid=4800 + worker, how="SIGKILL")
        self.members.remove(worker)
        self.generation += 1
        self._form()

    def join(self) -> int:
        self.members.append(self.next_id)
        self.next_id, self.generation = self.next_id + 1, self.generation + 1
        self._form()
        return self.members[-1]

    def end(self, code: int = 0, why: str = "the script has ended on every worker") -> None:
        self.event("end", code=code, why=why, stopped_after=None)
        self.close()

    def close(self) -> None:
        """As if the process that supervises the run was killed."""
        if self._folder >= 0:
            os.close(self._folder)
            self._writer.close()
            self._folder = -1

    def _form(self) -> None:
        form = {"Form": {"number": self.generation, "members": list(self.members)}}
        self.event("event", event={"Ready": {}}, actions=[form], why="all are ready")
