"""``lockstep.launch`` on real processes, from a plain script and from a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fork_server import ROOT
from tests.launch import DEADLINE_S, LaunchedRun, is_running

TRAIN = """
import hashlib, os, signal, torch, lockstep

def train(victim):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters())
    run = lockstep.Run(model, opt, lanes=4)
    data = torch.utils.data.TensorDataset(torch.arange(256.).reshape(64, 4) / 256)
    for (x,) in run.shard(data, global_batch=8, epochs=8, shuffle=True):
        model(x).square().mean().backward()
        opt.step(); opt.zero_grad()
        if run.committed and run.step == 9 and os.environ["LOCKSTEP_WORKER"] == victim:
            os.kill(os.getpgrp(), signal.SIGKILL)  # the zygote: the replacement needs another one
            os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("trained on rank", run.rank)
    return run.rank, hashlib.sha256(weights).hexdigest()
"""


def test_results_come_back_by_rank_and_errors_with_the_workers_traceback(
    launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, threading, lockstep, torch
import torch.distributed as dist

def total(base):
    dist.init_process_group("gloo")
    value = torch.tensor(base + dist.get_rank())
    dist.all_reduce(value)
    print("on rank", dist.get_rank())
    dist.destroy_process_group()
    return int(os.environ["RANK"]), value

def fails(kind):
    if os.environ["RANK"] == "1":
        raise KeyError(kind)

def refused(*arguments, **options):
    try:
        lockstep.launch(*arguments, **options)
    except (lockstep.WorkerError, lockstep.UsageError) as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    assert lockstep.launch(total, 2, 10) == [(0, torch.tensor(21)), (1, torch.tensor(21))]
    assert lockstep.launch(total, 2, 10, start_method="spawn") == [(0, torch.tensor(21)), (1, torch.tensor(21))]
    offset = 3
    assert lockstep.launch(lambda rank: int(os.environ[rank]) + offset, 3, "LOCAL_RANK", run_dir="here") == [3, 4, 5]
    text = refused(fails, 2, "unknown")
    assert text.startswith("WorkerError: worker ") and "(rank 1, pid " in text, text
    assert "in fails\\n    raise KeyError(kind)\\nKeyError: 'unknown'" in text, text
    text = refused(lambda: threading.Lock(), 1)
    assert "the function returned a lock, which cannot be sent" in text, text
    text = refused(lambda: os.kill(os.getpid(), 9), 1, max_respawns=0)
    assert "killed by SIGKILL" in text, text
    text = refused(lambda: lockstep.launch(total, 1, 0), 1)
    assert "lockstep.launch was called in a worker of another run" in text, text
    for arguments, sentence in [((3, 2), "cannot be called"), ((total, 0), "n=0 is not a number of workers")]:
        assert sentence in refused(*arguments), refused(*arguments)
    assert "cannot be sent to spawned workers" in refused(lambda: 1, 1, start_method="spawn")
    print("all of it")
"""
    )
    run = launch(script, workers=0)
    assert run.wait() == 0, run.dump()
    assert run.stdout() == "on rank 0\non rank 0\nall of it\n", run.dump()
    assert (run.folder / "here/workers/2/log.txt").exists()
    assert not list(run.folder.glob("lockstep-runs/*/agent.sock"))


def test_a_worker_that_dies_is_replaced_and_the_result_keeps_its_bits(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        TRAIN
        + """
alone, disturbed = lockstep.launch(train, 1, ""), lockstep.launch(train, 2, "1")
assert [rank for rank, _ in disturbed] == [0, 1][:len(disturbed)], disturbed
assert {weights for _, weights in disturbed} == {alone[0][1]}, (alone, disturbed)
""",
        workers=0,
    )
    assert run.wait() == 0, run.dump()
    assert "died: SIGKILL. 1 worker goes on; a replacement is starting." in run.stderr()
    assert run.stdout() == "trained on rank 0\n" * 2


def test_a_library_that_starts_a_thread_in_each_fork_does_not_prevent_a_launch(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import os, threading, lockstep

def start_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

os.register_at_fork(after_in_child=start_thread)  # as OpenTelemetry does, which W&B uses
start_thread()
print(lockstep.launch(lambda: int(os.environ["RANK"]), 2))
""",
        workers=0,
    )
    assert run.wait() == 0, run.dump()
    assert run.stdout() == "[0, 1]\n"


def test_ctrl_c_stops_the_workers_and_is_raised(launch: Callable[..., LaunchedRun]) -> None:
    run = launch(
        """
import os, time, lockstep

def wait():
    with open("pid-" + os.environ["RANK"], "w") as note:
        note.write(f"{os.getpid()}\\n")
    time.sleep(1000)

try:
    lockstep.launch(wait, 2)
except KeyboardInterrupt:
    print("interrupted")
""",
        workers=0,
    )
    pids = run.pids(2)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.dump()
    assert run.stdout() == "interrupted\n"
    assert not any(is_running(pid) for pid in pids)


NOTEBOOK = """
import json, sys
import nbclient, nbformat

cells = json.loads(sys.stdin.read())
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


def test_it_works_in_a_notebook(tmp_path: Path) -> None:
    cells = [
        TRAIN,
        # What people do first: torch has threads now, and autograd has run.
        "import threading\nmodel = torch.nn.Linear(500, 500)\nmodel(torch.randn(500, 500)).sum().backward()\nfactor = 2",
        "alone = lockstep.launch(train, 1, '')\nresults = lockstep.launch(train, 2, '1')\n"
        "print({weights for _, weights in results} == {alone[0][1]})",
        "lockstep.launch(lambda: factor / int(os.environ['RANK']), 2)",
        "lockstep.launch(lambda: factor * 21, 2)",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-W", "ignore", "-c", NOTEBOOK]
    done = subprocess.run(
        command, input=json.dumps(cells), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=2 * DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    _, _, trained, failed, last = json.loads(done.stdout)

    def shown(outputs: list[dict[str, str]], name: str) -> str:
        return "".join(each["text"] for each in outputs if each.get("name") == name)

    assert shown(trained, "stdout") == "trained on rank 0\ntrained on rank 0\nTrue\n", trained
    assert "died: SIGKILL. 1 worker goes on" in shown(trained, "stderr")
    assert (failed[-1]["ename"], "ZeroDivisionError: division by zero" in failed[-1]["evalue"]) == ("WorkerError", True), failed[-1]
    assert last[-1]["data"]["text/plain"] == "[42, 42]", last
