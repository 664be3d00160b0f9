"""Trains a small model with trackers. Its rank 0 can be killed at any place, also inside a tracker's write.

TRACKED: the trackers, such as "csv,tensorboard"; "plain" is an object without last_step, which appends to plain.jsonl,
"late" writes late.jsonl at the end of the loop, "gone" cannot be opened, and "mlflow-files" is MLflow with its file store in the
folder mlruns.
TRACKED_CHECKPOINT: where checkpoints are saved. TRACKED_RESUME: Run's ``resume``. TRACKED_STEPS: how many steps there are.
TRACKED_STOP_AT: the step that waits for the file named hurry. TRACKED_VERIFY_EVERY: Run's ``verify_every``.

The loop is slow until a file named hurry appears. It writes pid-<worker>, main (the worker that is rank 0), step (the last one that
rank 0 has committed), and done-<worker>, the run's fingerprint. If a file die-<place> appears, rank 0 removes it and is killed at
that place: "before" or "after" a tracker's write, or when "half" of it is written.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import lockstep
import lockstep.observe.tracker_csv
import lockstep.observe.tracker_mlflow
import lockstep.observe.tracker_tensorboard
import lockstep.observe.tracker_wandb

worker = os.environ.get("LOCKSTEP_WORKER", "0")
names = os.environ["TRACKED"].split(",")
steps = int(os.environ.get("TRACKED_STEPS", "60"))
stop_at = int(os.environ.get("TRACKED_STOP_AT", "-1"))
write_really = os.write


def die_if_asked(place: str) -> None:
    try:
        Path(f"die-{place}").unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def write_or_die(file: int, data: Any) -> int:
    die_if_asked("before")
    if Path("die-half").exists():
        write_really(file, bytes(data)[: len(data) // 2])
        die_if_asked("half")
    count = write_really(file, data)
    die_if_asked("after")
    return count


class DyingOs:
    """The module os, with a write that can kill this process."""

    write = staticmethod(write_or_die)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def kill_around(tracker: type, method: str) -> None:
    called = getattr(tracker, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        die_if_asked("before")
        result = called(self, *args, **options)
        die_if_asked("after")
        return result

    setattr(tracker, method, call)


lockstep.observe.tracker_csv.os = DyingOs()
lockstep.observe.tracker_tensorboard.os = DyingOs()
kill_around(lockstep.observe.tracker_wandb.Wandb, "log")
kill_around(lockstep.observe.tracker_mlflow.Mlflow, "flush")


class Plain:
    """Says nothing about what it holds."""

    def log(self, step: int, values: dict[str, float]) -> None:
        file = os.open("plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps([step, {name: value.hex() for name, value in values.items()}]).encode() + b"\n")
        os.close(file)


class Late:
    """Writes nothing before the end of the loop: until then all steps are in the backlog."""

    def open(self, run_id: str, folder: Path) -> None:
        self.path, self.lines = Path("late.jsonl"), []
        self.written = json.loads(self.path.read_text().splitlines()[-1])[0] if self.path.exists() else 0

    def last_step(self) -> int:
        return self.written

    held = last_step

    def log(self, step: int, values: dict[str, float]) -> None:
        self.lines.append([step, {name: value.hex() for name, value in values.items()}])

    def settle(self) -> None:
        die_if_asked("before")
        if self.lines:
            with self.path.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in self.lines))
            self.written, self.lines = self.lines[-1][0], []
        die_if_asked("after")


class Gone:
    """Its server does not answer. Each try is a line of tries."""

    def open(self, run_id: str, folder: Path) -> None:
        with Path("tries").open("a") as file:
            file.write(f"{worker}\n")
        time.sleep(3.0)
        raise TimeoutError("the server does not answer")

    def log(self, step: int, values: dict[str, float]) -> None:
        raise AssertionError("it is not open")


def note(name: str, text: str) -> None:
    temporary = Path(f".{name}.{os.getpid()}")
    temporary.write_text(f"{text}\n")
    temporary.rename(name)


OWN = {
    "plain": Plain,
    "late": Late,
    "gone": Gone,
    "mlflow-files": lambda: lockstep.track.Mlflow(uri=Path("mlruns").absolute().as_uri()),
}
note(f"pid-{worker}", str(os.getpid()))
torch.manual_seed(11)
model = torch.nn.Linear(16, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(12 * steps // 2, 16))
run = lockstep.Run(
    *(model, opt),
    lanes=6,
    log_every=4,
    checkpoint=os.environ.get("TRACKED_CHECKPOINT"),
    every="10 steps",
    keep=100,
    verify_every=int(os.environ.get("TRACKED_VERIFY_EVERY", "100")),
    resume=os.environ.get("TRACKED_RESUME", "auto"),
    track=[OWN[name]() if name in OWN else name for name in names],
)
for (x,) in run.shard(data, global_batch=12, shuffle=True, epochs=2):
    loss = model(x).square().mean()
    run.log(loss=loss)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if run.committed:
        run.log(learning_rate=0.1 / run.step)
        if run.step > 20:
            run.log(late=1.0 / run.step)
        if run.is_main:
            note("main", worker)
            note("step", str(run.step))
        while run.step == stop_at and not Path("hurry").exists():
            time.sleep(0.01)
    if not Path("hurry").exists():
        time.sleep(0.02)
run.close()
note(f"done-{worker}", run.fingerprint())
