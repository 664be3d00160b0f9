"""The complete scripts in examples/ give one fingerprint: on 1, 2 and 3 workers, with a worker killed, and cut and resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.observe.ledger import read
from tests.fork_server import ROOT
from tests.launch import LaunchedRun

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, g++, for the CPU")
EXAMPLES = [
    "image_classifier",
    "language_model",
    "fine_tuning",
    "mixed_precision",
    "streaming",
    "distillation",
    "dcgan",
    "actor_critic",
    "contrastive",
    pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler]),
]
DEADLINE_S = 240.0  # the first run of a compiled model compiles it


class ExampleRun(LaunchedRun):
    """One run of an example. All runs of a ``place`` share the folder ``checkpoints`` in it."""

    def __init__(self, name: str, place: Path, folder: str, workers: int) -> None:
        (place / "checkpoints").mkdir(parents=True, exist_ok=True)
        (place / folder).mkdir()
        (place / folder / "checkpoints").symlink_to(place / "checkpoints")
        script = ROOT / "examples" / f"{name}.py"
        super().__init__(script, "--ledger", folder=place / folder, workers=workers, env={"OMP_NUM_THREADS": "1"})

    def fingerprint(self) -> str:
        """Wait for the end. Returns what rank 0 has printed last."""
        assert self.wait(DEADLINE_S) == 0, self.dump()
        found = re.findall(r"^[0-9a-f]{64}$", self.stdout(), re.MULTILINE)
        assert len(found) == 1, self.dump()
        return str(found[0])

    def wait_for_step(self, step: int) -> None:
        def is_committed() -> bool:
            ledger = self.run_dir / "ledger"
            return any(ledger.glob("*.jsonl")) and any(line["kind"] == "commit" and line["step"] >= step for line in read(ledger))

        self.wait_until(is_committed, f"step {step} is committed", DEADLINE_S)

    def pid_of(self, worker: int) -> int:
        events = (entry["event"].get("JoinRequested", {}) for entry in self.events())
        return next(int(event["pid"]) for event in events if event.get("worker") == worker)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ExampleRun]]:
    started: list[ExampleRun] = []

    def start_here(name: str, place: str, folder: str, workers: int) -> ExampleRun:
        started.append(ExampleRun(name, tmp_path / place, folder, workers))
        return started[-1]

    yield start_here
    for run in started:
        run.stop()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_one_fingerprint_whatever_happens(name: str, start: Callable[..., ExampleRun]) -> None:
    expected = start(name, "alone", "run", 0).fingerprint()
    assert start(name, "three", "run", 3).fingerprint() == expected
    killed = start(name, "killed", "run", 2)
    killed.wait_for_step(15)
    os.kill(killed.pid_of(1), signal.SIGKILL)
    assert killed.fingerprint() == expected
    assert len(killed.generations()) > 1, killed.dump()
    cut = start(name, "cut", "first", 2)
    cut.wait_for_step(22)
    cut.process.send_signal(signal.SIGTERM)
    assert cut.wait() == 0, cut.dump()
    assert "stopped by SIGTERM" in cut.output(), cut.dump()
    resumed = start(name, "cut", "second", 3)
    assert resumed.fingerprint() == expected
    assert "resumed at step " in resumed.output(), resumed.dump()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80 or path.stem == "train_gpt"
