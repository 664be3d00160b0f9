"""The ledger: which samples each worker put into which step, and which steps committed. One append-only file per worker.

A worker writes the samples of a step before it sends the first bucket of its last lane, and another line when the step commits.
A step commits only after every worker of the generation has sent its buckets, hence has written its samples: the ledger is
complete, whichever worker is killed at whatever time. ``audit`` checks that every sample was committed exactly once.
Training does not depend on it: if it cannot be written (a full disk), a warning says so once, and ``audit`` finds what is missing.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.recording.json_lines import JsonLinesFile, objects


class Ledger:
    """One worker's file. Every line is one ``write`` system call, so it survives any end of this process."""

    def __init__(self, folder: str, worker: int) -> None:
        self._path = Path(folder, f"{worker}.jsonl")
        self._file: JsonLinesFile | None = None
        self._warned = False
        try:
            Path(folder).mkdir(exist_ok=True)
            self._file = JsonLinesFile(self._path)
        except OSError as error:
            self._warn(error)

    def record_samples(self, step: int, generation: int, position: tuple[int, int, int], lanes: dict[int, list[int]]) -> None:
        """Write the sample indices of this worker's lanes, before the step commits.

        ``position`` is (stage, epoch, step in the epoch); a stage is one loop over ``run.shard`` in the script.
        """
        self._write({"kind": "samples", "step": step, "generation": generation, "position": position, "lanes": lanes})

    def record_commit(self, step: int, generation: int) -> None:
        """Write that the step has committed on this worker."""
        self._write({"kind": "commit", "step": step, "generation": generation})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(json.dumps(line) + "\n")
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the ledger {self._path} cannot be written ({error.strerror}). It will be incomplete; training continues.",
                stacklevel=2,
            )


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all workers' files in a ledger's folder. A line that was written in part (a full disk) is left out.

    Raises:
        UsageError: If the folder has no ledger.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UsageError(f"there is no ledger in {folder}. Start the run with `lockstep run --ledger`, and pass RUN_DIR/ledger.")
    return [line for path in files for line in objects(path.read_bytes().splitlines())]


def audit(lines: Iterable[dict[str, Any]], samples: int, epochs: int) -> list[str]:
    """Check that every sample of every epoch was committed exactly once. Pure.

    Args:
        lines: What ``read`` returned.
        samples: The number of samples in an epoch.
        epochs: The number of epochs that the run trained, over all its loops.

    Returns:
        One sentence for each mistake; an empty list if every sample was committed exactly once in every epoch.

    Example:
        After ``lockstep run --ledger --run-dir runs/1 train.py``::

            mistakes = audit(read(Path("runs/1/ledger")), samples=len(dataset), epochs=3)
    """
    lines = list(lines)
    commits: dict[int, set[int]] = {}
    for line in lines:
        if line["kind"] == "commit":
            commits.setdefault(line["step"], set()).add(line["generation"])
    if not commits:
        return [f"no step was committed: the ledger has {len(lines)} lines, and none of them is a commit"]
    mistakes = [f"step {step} committed in generations {sorted(found)}" for step, found in commits.items() if len(found) > 1]
    seen: dict[tuple[int, int], Counter[int]] = {}
    for line in lines:
        if line["kind"] == "samples" and line["generation"] in commits.get(line["step"], ()):
            stage, epoch, _ = line["position"]
            seen.setdefault((stage, epoch), Counter()).update(i for lane in line["lanes"].values() for i in lane)
    if len(seen) != epochs:
        mistakes.append(f"samples of {len(seen)} epochs were committed, and {epochs} were expected")
    for (stage, epoch), counts in sorted(seen.items()):
        never = [i for i in range(samples) if not counts[i]]
        often = [i for i, count in counts.items() if count > 1]
        if never or often:
            mistakes.append(f"stage {stage}, epoch {epoch}: never {never[:5]}, more than once {often[:5]}")
    return mistakes
