"""What the recording of a run costs: the same steps with it and without it, in turn, in one run.

    python -m benchmarks.observe [--workers 2 4] [--blocks 30]
    python -m benchmarks.observe --gpu [--workers 1 2]      on GPUs; workers that share one use gloo

Every worker switches its recorder on and off every few steps, at the same steps. So both variants have the same process, the same
memory and the same noise. Each block is compared with the mean of the two blocks around it. "Work" is the CPU time of the recorder
itself: of its thread, and of what the main thread notes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write

SCRIPT = """
import json, os, sys, time, torch, lockstep
from examples.gpt import GPT, GPTConfig
blocks, block, note = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
config = GPTConfig(layers=4, width=int(sys.argv[4]), context=64)
data = torch.randint(0, config.vocab, (4096, config.context + 1))
device = lockstep.World.detect().device() if sys.argv[5] == "gpu" else "cpu"
model = GPT(config).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = lockstep.Run(model, opt, lanes=4)
recorder = run._parts.recorder
spent = [0, 0]  # ns of the main thread in the recorder, calls
def timed(function):
    def call(*args, **kwargs):
        began = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.thread_time_ns() - began
            spent[1] += 1
    return call
thread = [0]
flush = recorder.flush
def timed_flush():
    began = time.thread_time_ns()
    flush()
    thread[0] += time.thread_time_ns() - began
recorder.flush = timed_flush
times, step = [], 0
began = None
for (batch,) in run.shard(torch.utils.data.TensorDataset(data), global_batch=32, shuffle=True, epochs=1000):
    model(batch.to(device)).backward()
    opt.step(); opt.zero_grad()
    if not run.committed:
        continue
    step += 1
    if step % block == 0:
        now = time.perf_counter()
        if began is not None:
            times.append((now - began) / block)
        began = now
        recorder.enabled = (step // block) % 2 == 0
    if step == block * (blocks + 2):
        break
if run.is_main:
    on_steps = step / 2
    open(note, "w").write(json.dumps({"times": times, "thread_us": thread[0] / on_steps / 1e3}))
recorder.enabled = True
for name in ("enter", "bucket_sent", "bucket_done", "end_step"):
    setattr(recorder, name, timed(getattr(recorder, name)))
steps = 0
for (batch,) in run.shard(torch.utils.data.TensorDataset(data), global_batch=32, shuffle=True):
    model(batch.to(device)).backward()
    opt.step(); opt.zero_grad()
    steps += run.committed
    if steps == 20:
        break
if run.is_main:
    empty = [0]
    nothing = timed(lambda: None)
    before = spent[0]
    for _ in range(1000):
        nothing()
    each = (spent[0] - before) / 1000
    calls = spent[1] - 1000
    found = json.loads(open(note).read())
    found["main_us"] = (before - calls * each) / steps / 1e3
    open(note, "w").write(json.dumps(found))
run.close()
"""


def measure(workers: int, blocks: int, steps: int, width: int, where: str) -> dict[str, Any]:
    """One run. Returns seconds per step of each block, and the CPU time of the recorder in microseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        note = Path(folder, "note.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--run-dir", f"{folder}/run", "script.py"]
        arguments = [str(blocks), str(steps), str(note), str(width), where]
        subprocess.run([*command, *arguments], cwd=folder, check=True, timeout=900, env=environment, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(note.read_text())
        return found


def ratios(times: list[float]) -> list[float]:
    """Each block with recording, divided by the mean of the two blocks around it. Odd blocks of ``times`` record."""
    return [times[k] / ((times[k - 1] + times[k + 1]) / 2) for k in range(1, len(times) - 1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--gpu", action="store_true", help="on GPUs, instead of the CPU")
    given = parser.parse_args()
    rows = [
        "| workers | ms per step without | with / without, median (quartiles) | work of the main thread | work of the thread |",
        "|---|---|---|---|---|",
    ]
    found = {}
    for workers in given.workers:
        one = found[workers] = measure(workers, given.blocks, given.steps, given.width, "gpu" if given.gpu else "cpu")
        off = statistics.median(one["times"][0::2])
        each = sorted(ratios(one["times"]))
        low, middle, high = each[len(each) // 4], statistics.median(each), each[-1 - len(each) // 4]
        shares = [f"{one[key]:.0f} us, {one[key] / off / 1e4:.2f}%" for key in ("main_us", "thread_us")]
        rows.append(f"| {workers} | {off * 1000:.1f} | {middle:.4f} ({low:.4f}-{high:.4f}) | {shares[0]} | {shares[1]} |")
    table = "\n".join(rows)
    print(table)
    command = "python -m benchmarks.observe " + " ".join(sys.argv[1:])
    name = "observe-gpu" if given.gpu else f"observe-{os.cpu_count()}-cores"
    write(name, {"machine": machine(gpu=given.gpu), "found": found}, table, command.strip())


if __name__ == "__main__":
    main()
