"""What one machine has: versions, limits, shared memory, GPUs. Each function returns values for JSON; none of them judges."""

from __future__ import annotations

import glob
import json
import os
import platform
import resource
import subprocess
import sys
from typing import Any

import lockstep
from lockstep.comm import segment
from lockstep.comm.segment import Segment, SegmentError
from lockstep.doctor.torch_probe import MARK

_SEGMENT_BYTES = 4 << 20
Facts = dict[str, Any]


def own_facts() -> Facts:
    """What can be found in an instant."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "python": platform.python_version(),
        "lockstep": lockstep.__version__,
        "open_files": soft if soft != resource.RLIM_INFINITY else 1 << 30,
        "shm_bytes": shared.f_bsize * shared.f_blocks if shared is not None else 0,
        "free_bytes": min(segment.free_bytes(), 1 << 60),
        "nvidia_devices": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def torch_facts(timeout_s: float) -> Facts:
    """What torch and shared memory do, in a child process that imports torch. ``slow_s`` is not 0 if that took too long."""
    found: Facts = {"version": "", "error": "", "segment": "", "gpus": [], "nccl": "", "slow_s": 0.0}
    try:
        shared = Segment.create(_SEGMENT_BYTES)
    except SegmentError as error:
        shared, found["segment"] = None, error.reason
    address, nbytes = (shared.address, shared.nbytes) if shared is not None else ("", 0)
    command = [sys.executable, "-m", "lockstep.doctor.torch_probe", address, str(nbytes)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {**found, "slow_s": timeout_s}
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        return {**found, "error": last}
    if shared is None:
        answer["segment"] = found["segment"]
    elif not answer["segment"] and shared.memory[: len(MARK)] != MARK:
        answer["segment"] = "what another process writes does not arrive"
    return {**found, **answer}
