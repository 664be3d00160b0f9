"""How long workers take to start: `lockstep run`, torchrun and plain `import torch`, interleaved in one run.

    python -m benchmarks.start [--workers 8] [--rounds 5]

Every worker runs a script that imports torch and makes an optimizer, and writes down when. Counted is the time from the
command to the last worker's note. The yardstick is two `import torch` in fresh processes, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import machine, write

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
imported = time.time()
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
rank = os.environ.get("LOCKSTEP_RANK") or os.environ["RANK"]
Path(sys.argv[1], rank).write_text(f"{imported} {time.time()}")
"""


def started(command: list[str], folder: Path, workers: int) -> tuple[float, float]:
    """Seconds from the command to the last worker's import, and to its first optimizer."""
    notes = folder / "notes"
    notes.mkdir()
    begin = time.time()
    subprocess.run([*command, "script.py", "notes"], cwd=folder, check=True, timeout=300, stderr=subprocess.DEVNULL)
    times = [tuple(map(float, note.read_text().split())) for note in notes.iterdir()]
    assert len(times) == workers
    return max(imported for imported, _ in times) - begin, max(done for _, done in times) - begin


def two_imports() -> float:
    begin = time.time()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=300)
    return time.time() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    commands = {
        "lockstep run": [sys.executable, "-m", "lockstep", "run", "-n", str(given.workers)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.workers}"],
    }
    imported: dict[str, list[float]] = {name: [] for name in commands}
    ready: dict[str, list[float]] = {name: [] for name in commands}
    yardstick = []
    two_imports()  # files are read once
    for _ in range(given.rounds):
        yardstick.append(two_imports())
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "script.py").write_text(SCRIPT)
                first, second = started(command, Path(folder), given.workers)
                imported[name].append(first)
                ready[name].append(second)
    two = statistics.median(yardstick)
    rows = [f"| {given.workers} workers | torch imported, s | first optimizer, s | of two imports |", "|---|---|---|---|"]
    for name in commands:
        first, second = statistics.median(imported[name]), statistics.median(ready[name])
        rows.append(f"| {name} | {first:.2f} | {second:.2f} | {first / two:.2f} |")
    rows.append(f"| two `import torch`, one after the other | {two:.2f} | | 1 |")
    table = "\n".join(rows)
    print(table)
    data = {"machine": machine(), "workers": given.workers, "two_imports": yardstick, "imported": imported, "optimizer": ready}
    write(
        f"start-{given.workers}-workers",
        data,
        table,
        f"python -m benchmarks.start --workers {given.workers} --rounds {given.rounds}",
    )


if __name__ == "__main__":
    main()
