"""Says where in the user's script this worker is, for errors about workers that make different calls."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from lockstep.training.progress import Progress

_PACKAGE = str(Path(__file__).parents[1])


def describe_place(progress: Progress) -> str:
    """Return for example "train.py:41, step 12 of epoch 1 of loop 0". Any thread may call it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    line = _user_line(frame)
    loop = progress.loop
    if loop is None:
        return f"{line}, between loops after step {progress.step}"
    return f"{line}, step {progress.step} in epoch {progress.epoch} of loop {loop.stage}"


def _user_line(frame: FrameType | None) -> str:
    """The innermost line of the main thread that is in neither this package nor torch."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<")) and "/torch/" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
