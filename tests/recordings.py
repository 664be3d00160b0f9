"""Made-up run folders: the files that a run of known workers, delays and faults would have left. For tests of what reads them."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

from lockstep.recording import records
from lockstep.recording.records import BucketTimes, Metrics, Span, StepRecord
from lockstep.recording.writer import RecordingWriter

BEGIN = 1_763_500_000.0


def step_of(
    step: int,
    rank: int,
    size: int,
    *,
    at: float = BEGIN,
    own_us: dict[str, int] | None = None,
    slowest_us: int = 0,
    lanes: tuple[int, int] | None = None,
    generation: int = 0,
    worker: int | None = None,
    exchange_us: int = 3000,
    **more: Any,
) -> StepRecord:
    """A record whose own work takes ``own_us``; then it waits for the slowest worker (``slowest_us``) and for the transport."""
    own = {records.DATA: 1000, records.FORWARD: 30_000, records.BACKWARD: 50_000, records.OPTIMIZER: 8_000} | (own_us or {})
    before = sum(us for phase, us in own.items() if phase != records.OPTIMIZER)
    wait = max(0, slowest_us - before) + exchange_us
    order = [records.DATA, records.FORWARD, records.BACKWARD, records.EXCHANGE, records.CONFIRM, records.OPTIMIZER]
    lengths = own | {records.EXCHANGE: wait, records.CONFIRM: 200}
    spans, now = [], 0
    for phase in order:
        cpu = lengths[phase] if phase in records.COMPUTE else 0
        spans.append(Span(phase, now, now + lengths[phase], cpu))
        now += lengths[phase]
    backward = own[records.DATA] + own[records.FORWARD]
    sent = [backward + own[records.BACKWARD] * (k + 1) // 4 for k in range(4)]
    buckets = tuple(BucketTimes(k, us, before + wait - (3 - k) * 300, 25 << 20) for k, us in enumerate(sent))
    worker = rank if worker is None else worker
    lanes = (2 * rank, 2 * rank + 2) if lanes is None else lanes
    given = {"samples": 32, "memory_bytes": 800 << 20} | more
    return StepRecord(step, worker, rank, size, generation, lanes, at, tuple(spans), buckets, **given)  # type: ignore[arg-type]


def make_run(
    folder: Path,
    *,
    workers: int = 4,
    steps: int = 200,
    slow_rank: int | None = 2,
    slow_phase: str = records.DATA,
    slow_us: int = 30_000,
    dies_at: int | None = 120,
    replaced_at: int | None = 140,
    ended: bool = True,
    seed: int = 0,
    begin: float = BEGIN,
) -> Path:
    """Write a run folder: one worker is slow from step 50 on; at ``dies_at`` the last rank is killed, and replaced later.

    Returns ``folder``. The events have the form of those that the supervisor writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    events: list[dict[str, Any]] = []

    def event(at: float, kind: str, **facts: Any) -> None:
        events.append({"time": at, "kind": kind, **facts})

    writer = RecordingWriter(folder / "recording")
    now, size, generation, members = begin, workers, 0, list(range(workers))
    event(now - 2, "command", role="run", words=["train.py"], host=socket.gethostname(), pid=4711)
    event(now - 2, "begin", settings={"size": workers}, pid=4711)
    event(
        now, "event", event={"JoinRequested": {}}, actions=[{"Form": {"number": 0, "members": list(members)}}], why="all are there"
    )
    loss = 3.0
    for step in range(1, steps + 1):
        if step == dies_at:
            dead = members.pop()
            event(now + 0.01, "exited", worker=dead, pid=4800 + dead, how="SIGKILL")
            size, generation = size - 1, generation + 1
            why = f"worker {dead} died (SIGKILL)"
            form = {"Form": {"number": generation, "members": list(members)}}
            event(now + 0.06, "event", event={"Died": {"worker": dead, "how": "SIGKILL"}}, actions=[form], why=why)
            now += 0.07
        if step == replaced_at and dies_at is not None:
            members.append(workers)
            size, generation = size + 1, generation + 1
            form = {"Form": {"number": generation, "members": list(members)}}
            event(now, "event", event={"JoinRequested": {"worker": workers}}, actions=[form], why="worker joined")
        own = []
        for rank in range(size):
            mine = {
                records.DATA: rng.randint(800, 1200),
                records.FORWARD: rng.randint(29_500, 30_500),
                records.BACKWARD: rng.randint(49_000, 51_000),
                records.OPTIMIZER: rng.randint(7900, 8100),
            }
            if rank == slow_rank and step >= 50:
                mine[slow_phase] += slow_us
            own.append(mine)
        slowest = max(sum(us for phase, us in mine.items() if phase != records.OPTIMIZER) for mine in own)
        cuts = [8 * rank // size for rank in range(size + 1)]
        made = [
            step_of(
                step,
                rank,
                size,
                at=now,
                own_us=own[rank],
                slowest_us=slowest,
                lanes=(cuts[rank], cuts[rank + 1]),
                generation=generation,
                worker=members[rank],
                epoch=(step - 1) // 100,
            )
            for rank in range(size)
        ]
        writer.write([record.to_json() for record in made])
        now += max(record.seconds for record in made)
        loss = 0.4 + (loss - 0.4) * 0.985 + rng.uniform(-0.02, 0.02)
        writer.write([Metrics(step, now, {"loss": loss, "lr": 1e-3 * (1 - step / steps / 2)}).to_json()])
        if step % 100 == 0:
            event(now, "saved", step=step, where="checkpoints/step-000000100-01a1e4fd0da4e3df")
    writer.close()
    if ended:
        event(now, "end", code=0, why="the script has ended on every worker", stopped_after=None)
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    for id in {*members, *range(workers)}:
        (folder / "workers" / str(id)).mkdir(parents=True, exist_ok=True)
        (folder / "workers" / str(id) / "log.txt").write_text(f"worker {id} says hello\n")
    return folder
