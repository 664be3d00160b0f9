"""`lockstep run` on a pseudo-terminal whose screen is interpreted: the bar, its size, blocked terminals, rank 0, failures."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

from tests.fork_server import ROOT
from tests.launch import LaunchedRun

DEADLINE_S = 60.0

TELL = """
import json, os, socket, sys, time
from pathlib import Path
line = socket.socket(fileno=os.dup(int(os.environ["LOCKSTEP_AGENT_FD"])))
def tell(step, **more):
    packet = {"type": "progress", "step": step, "epoch": 0, "values": {"loss": 1 / step}, "samples": 32 * step, "total": 344}
    line.send(json.dumps({**packet, **more}).encode())
def wait_for(name):
    end = time.monotonic() + 60
    while not Path(name).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
"""
"""A script that says how far it is without training anything."""

TRAIN = """
import os, signal, time
from pathlib import Path
import torch, lockstep
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.Run(model, opt, lanes=4)
for (x,) in run.shard(torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch=8, epochs=100):
    loss = model(x).square().mean()
    run.log(loss=loss)
    if run.step == 20 and run.generation == 0 and run.rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    opt.step(); opt.zero_grad()
    if run.committed:
        time.sleep(0.01)
        if Path("enough").exists() and run.generation > 0 and run.size == 4:
            break
run.close()
"""


class Terminal:
    """A run on a terminal of its own, with what its screen shows. ``read`` must be called for anything to arrive."""

    def __init__(self, folder: Path, script: str, *options: str, columns: int = 100, lines: int = 30, **env: str) -> None:
        (folder / "script.py").write_text(script)
        self.folder = folder
        self._keyboard, self._theirs = pty.openpty()
        self.screen = pyte.HistoryScreen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = bytearray()
        self.resize(columns, lines)
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_", "NO_COLOR", "COLUMNS", "LINES"))
        }
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        command = f"exec {sys.executable} -m lockstep run --run-dir run {' '.join(options)} script.py"
        self.process = subprocess.Popen(
            ["sh", "-c", f"{command} <>{os.ttyname(self._theirs)} >&0 2>&0"],
            cwd=folder,
            start_new_session=True,
            env={**clean, "TERM": "xterm-256color", "PYTHONPATH": path, **env},
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, timeout_s: float = 0.1) -> None:
        if select.select([self._keyboard], [], [], timeout_s)[0]:
            data = os.read(self._keyboard, 65536)
            self.bytes += data
            self._stream.feed(data)

    def rows(self) -> list[str]:
        rows = [line.rstrip() for line in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def text(self) -> str:
        return "\n".join(self.rows())

    def wait_for(self, pattern: str) -> None:
        """Until the screen shows it."""
        end = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.text(), re.MULTILINE):
            assert time.monotonic() < end, self.text()
            self.read()

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def wait(self) -> int:
        """Until the run is over and all that it has written was read."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text()
            self.read()
        self.read(0.2)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        for descriptor in (self._keyboard, self._theirs):
            os.close(descriptor)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(script: str, *options: str, columns: int = 100, **env: str) -> Terminal:
        started.append(Terminal(tmp_path, script, *options, columns=columns, **env))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_bar_is_below_the_output_and_gone_at_the_end(terminal: Callable[..., Terminal]) -> None:
    run = terminal(TELL + "tell(1); tell(86); print('out'); print('err', file=sys.stderr); wait_for('go'); print('end')", "-n 1")
    run.wait_for(r"^err\n [━╺╸]+   25%  step  86 of 344")
    assert set(run.rows()[:2]) == {"out", "err"}
    assert run.rows()[3].startswith(" loss 0.01163")
    assert "1 worker" in run.rows()[3]
    run.touch("go")
    assert run.wait() == 0
    shown = run.rows()
    assert shown[2] == "end"
    assert re.fullmatch(r"lockstep: 86 steps in \S+ s, \S+ samples/s, loss 0\.01163\.", shown[3])
    assert shown[4] == "lockstep: `lockstep report run` shows the run; its logs are there too."
    assert len(shown) == 5


def test_a_terminal_that_becomes_narrow_and_wide_again_keeps_whole_lines(terminal: Callable[..., Terminal]) -> None:
    run = terminal(TELL + "tell(1); tell(86); print('out'); wait_for('go')", "-n 1")
    run.wait_for("step  86 of 344")
    bar = r"\Aout\n [━╺╸]{5,} +25%"
    for columns, shown in ((20, bar + r"\n loss 0\.01163\Z"), (60, bar + "  step  86 of 344"), (5, "2…")):
        run.resize(columns, 30)
        run.wait_for(shown)
    run.resize(100, 2)
    run.wait_for("step  86 of 344")
    run.touch("go")
    assert run.wait() == 0


def test_a_line_of_rank_0_that_is_not_ended_stays_whole(terminal: Callable[..., Terminal]) -> None:
    script = "tell(1); sys.stdout.write('one '); sys.stdout.flush(); wait_for('go'); tell(43); print('two'); wait_for('end')"
    run = terminal(TELL + script, "-n 1")
    run.wait_for("^one$")
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        run.read(0.05)
    assert run.rows() == ["one"]
    run.touch("go")
    run.wait_for(r"\Aone two\n.* 12%  step  43 of 344")
    run.touch("end")
    assert run.wait() == 0


def test_a_terminal_that_takes_nothing_holds_up_neither_agent_nor_worker(terminal: Callable[..., Terminal]) -> None:
    """As after Ctrl-S. The bar fills no queue meanwhile."""
    script = """
for step in range(1, 300):
    tell(step)
    time.sleep(0.005)
Path("done").touch()
wait_for("go")
print("last words")
"""
    run = terminal(TELL + script, "-n 1")
    run.wait_for(r"step +\d+ of 344")
    termios.tcflow(run._theirs, termios.TCOOFF)
    try:
        end = time.monotonic() + DEADLINE_S
        while not (run.folder / "done").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        before = len(run.bytes)
        for _ in range(10):
            run.read(0.05)
        assert len(run.bytes) - before < 5000  # what was on its way
    finally:
        termios.tcflow(run._theirs, termios.TCOON)
    run.wait_for("step 299 of 344")
    run.touch("go")
    assert run.wait() == 0
    assert "last words" in run.text()


def test_a_terminal_that_nobody_reads_holds_up_neither_agent_nor_worker(terminal: Callable[..., Terminal]) -> None:
    """As if a laptop sleeps at the other end of ssh."""
    script = """
tell(1)
for number in range(2000):
    print(f"line {number} {'x' * 190}", flush=True)
Path("done").touch()
wait_for("go")
print("last words")
"""
    run = terminal(TELL + script, "-n 1")
    end = time.monotonic() + DEADLINE_S
    while not (run.folder / "done").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    run.wait_for("line 1999")
    run.touch("go")
    assert run.wait() == 0
    numbers = re.findall(rb"line (\d+) x{190}\r\n", bytes(run.bytes))
    assert [int(each) for each in numbers] == list(range(2000))
    assert "last words" in run.text()


@pytest.mark.parametrize("how", ["--plain", "dumb"])
def test_plain_lines_have_no_control_characters(terminal: Callable[..., Terminal], how: str) -> None:
    options, term = (("-n 1", "--plain"), "xterm") if how == "--plain" else (("-n 1",), "dumb")
    run = terminal(TELL + "tell(1); tell(86); print('out')", *options, TERM=term)
    assert run.wait() == 0
    assert b"\x1b" not in run.bytes
    lines = run.bytes.decode().split("\r\n")[:2]
    assert "out" in lines
    assert any(line.startswith("lockstep: step 1 of 344 (0%) | epoch 0 | loss 1 | ") for line in lines), lines


def test_no_color_is_respected(terminal: Callable[..., Terminal]) -> None:
    run = terminal(TELL + "tell(1); tell(86); wait_for('go')", "-n 1", NO_COLOR="1")
    run.wait_for("step  86 of 344")
    run.touch("go")
    assert run.wait() == 0
    assert set(re.findall(rb"\x1b\[([0-9;]*)m", bytes(run.bytes))) <= {b"0", b"1", b"2"}


def test_two_workers_die_at_once_and_each_death_is_one_line(terminal: Callable[..., Terminal]) -> None:
    run = terminal(TRAIN, "-n 4")
    run.touch("enough")
    assert run.wait() == 0
    said = [re.sub(r"pid \d+", "pid", row) for row in run.rows() if row.startswith("lockstep: worker")]
    deaths = [re.sub(r"worker \d", "worker", row) for row in said if "died" in row]
    assert deaths == [
        "lockstep: worker (pid) died: SIGKILL. 3 workers go on; a replacement is starting.",
        "lockstep: worker (pid) died: SIGKILL. 2 workers go on; a replacement is starting.",
    ], run.text()
    joined = [row for row in said if "joined" in row]
    assert len(deaths) + len(joined) == len(said), run.text()
    assert 1 <= len(joined) <= 2
    assert re.search(r"joined\. 4 workers, generation \d\.$", joined[-1]), run.text()
    assert "2 failures survived" in run.text(), run.text()


def test_the_bar_of_a_training_run_has_a_total_from_its_first_step(terminal: Callable[..., Terminal]) -> None:
    run = terminal(TRAIN.replace("run.rank in (1, 2)", "False"), "-n 2")
    run.wait_for(r"starting 2 workers")
    run.wait_for(r"step +\d+ of 800")
    run.wait_for(r"2 workers  generation 0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


# -- errors ------------------------------------------------------------------------------------------


def test_one_error_of_all_workers_is_shown_once_with_the_users_own_line_first(tmp_path: Path) -> None:
    script = """
import os, torch
def fit(rank):
    return torch.ones(2) @ torch.ones(3 + rank)

fit(int(os.environ["LOCKSTEP_RANK"]))
"""
    run = LaunchedRun(script, folder=tmp_path, workers=3)
    try:
        assert run.wait() == 1
    finally:
        run.stop()
    lines = run.stderr().splitlines()
    assert lines[0].startswith("script.py:4: RuntimeError: "), run.stderr()
    assert lines[1] == "    return torch.ones(2) @ torch.ones(3 + rank)"
    assert re.fullmatch(r"lockstep: raised by worker \d \(rank \d, pid \d+\) on \S+\. The traceback:", lines[2])
    assert run.stderr().count("Traceback") == 1
    assert re.fullmatch(r"lockstep: workers \d and \d failed with the same error\.", lines[-2]), run.stderr()
    assert lines[-1].startswith("lockstep: the run ended with code 1: the script raised before training began. Its files are in ")


def test_different_errors_are_both_shown(tmp_path: Path) -> None:
    script = "import os\nif os.environ['LOCKSTEP_RANK'] == '0':\n    raise KeyError('a')\nraise ValueError('b')\n"
    run = LaunchedRun(script, folder=tmp_path, workers=2)
    try:
        assert run.wait() == 1
    finally:
        run.stop()
    said = run.stderr()
    assert "script.py:3: KeyError: 'a'" in said
    assert "script.py:4: ValueError: b" in said
    assert said.count("Traceback") == 1, said
    assert len(re.findall(r"^lockstep: raised by worker \d .*log\.txt\)$", said, re.MULTILINE)) == 1, said


def test_the_same_error_after_a_restart_is_not_shown_again(tmp_path: Path) -> None:
    run = LaunchedRun("import os\nrank = os.environ['RANK']\nraise KeyError('a')\n", folder=tmp_path, workers=1)
    try:
        assert run.wait() == 1
    finally:
        run.stop()
    said = run.stderr()
    assert "lockstep: worker 0 raised KeyError. All workers are stopped and start again (restart 1 of 3).\n" in said
    assert said.count("KeyError: 'a'") == 2, said  # the first line, and the traceback
    assert len(re.findall("^lockstep: worker 1 .* failed with the same error again.$", said, re.MULTILINE)) == 1, said
