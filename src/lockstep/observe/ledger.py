"""The ledger: which samples each worker put into which step, and which steps committed. Append-only files, one per worker.

A worker writes what it holds before the first bucket of its last lane leaves, and one more line when
it commits. A commit means that every member of that generation had sent its buckets, hence had
written its line: the ledger is whole whoever is killed and when. ``audit`` reads it back.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Ledger:
    """One worker's file. Every line is one ``write``: it outlives this process however that ends."""

    def __init__(self, folder: str, worker: int) -> None:
        Path(folder).mkdir(exist_ok=True)
        self._file = os.open(Path(folder, f"{worker}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def holds(self, step: int, generation: int, place: tuple[int, int, int], lanes: dict[int, list[int]]) -> None:
        """``place``: (stage, epoch, step in it). ``lanes``: the sample indices of this worker's lanes."""
        self._write({"holds": step, "generation": generation, "place": place, "lanes": lanes})

    def commits(self, step: int, generation: int) -> None:
        self._write({"commits": step, "generation": generation})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def audit(lines: Iterable[dict[str, Any]], samples: int) -> list[str]:
    """What is wrong: samples of an epoch that were committed never, or more than once. Empty: every one exactly once. Pure."""
    lines = list(lines)
    committed: dict[int, set[int]] = {}
    for line in lines:
        if "commits" in line:
            committed.setdefault(line["commits"], set()).add(line["generation"])
    wrong = [f"step {step} committed in generations {sorted(found)}" for step, found in committed.items() if len(found) > 1]
    seen: dict[tuple[int, int], Counter[int]] = {}
    for line in lines:
        if "holds" in line and line["generation"] in committed.get(line["holds"], ()):
            stage, epoch, _ = line["place"]
            seen.setdefault((stage, epoch), Counter()).update(i for lane in line["lanes"].values() for i in lane)
    for (stage, epoch), counts in sorted(seen.items()):
        never = [i for i in range(samples) if not counts[i]]
        often = [i for i, count in counts.items() if count > 1]
        if never or often:
            wrong.append(f"stage {stage}, epoch {epoch}: never {never[:5]}, more than once {often[:5]}")
    return wrong
