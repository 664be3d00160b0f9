"""Imported by scripts of process tests: shows the test where the loop is, and does to it what the test asks for.

LOOP_HOLD_AT: from this step on every iteration takes 0.1 s, until a file named hurry appears. LOOP_DIE_AT: worker 1 is killed after
this step, once. The script writes pid-<worker>, step, and done-<worker>: the digest of the state of the run.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import lockstep
from lockstep.comm.plain_state import digest, flatten

_WORKER = os.environ.get("LOCKSTEP_WORKER", "0")
_HOLD_AT, _DIE_AT = (int(os.environ.get(name, "1000000")) for name in ("LOOP_HOLD_AT", "LOOP_DIE_AT"))

Path(f"pid-{_WORKER}").write_text(f"{os.getpid()}\n")


def note_step(run: lockstep.Run) -> None:
    """Called in each iteration, after ``opt.step()``."""
    if not run.committed:
        return
    if run.is_main:
        Path("step").write_text(str(run.step))
    if _WORKER == "1" and run.step == _DIE_AT and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if run.step >= _HOLD_AT and not Path("hurry").exists():
        time.sleep(0.1)


def note_end(run: lockstep.Run) -> None:
    """Called at the end of the script."""
    Path(f"done-{_WORKER}").write_text(f"{run.step} {digest(*flatten(run._state.replicated(), 'state')).hex()}\n")
