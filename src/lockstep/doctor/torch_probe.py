"""A process that imports torch and prints what it has, as one line of JSON: `python -m lockstep.doctor.torch_probe ADDRESS BYTES`.

ADDRESS and BYTES: a segment of shared memory of the process that has started this one (comm/segment.py). Mapping it shows whether
workers can share memory.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from lockstep.comm.segment import Segment, SegmentError
from lockstep.launcher.linux import die_with_parent

MARK = b"lockstep doctor"


def main() -> None:
    """Print the line. Whatever fails is in it as text, because a broken torch may raise anything."""
    die_with_parent(os.getppid())
    found: dict[str, Any] = {"segment": _map(sys.argv[1], int(sys.argv[2])), "version": "", "error": "", "gpus": [], "nccl": ""}
    try:
        import torch

        found["version"] = str(torch.__version__)
        if torch.cuda.is_available():
            found["gpus"] = [_use(torch, number) for number in range(torch.cuda.device_count())]
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    except Exception as error:  # noqa: BLE001
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    print(json.dumps(found))


def _use(torch: Any, number: int) -> str:
    """Returns the name of a GPU that can be computed with. Raises if it cannot."""
    assert float(torch.ones(8, device=f"cuda:{number}").sum()) == 8
    return str(torch.cuda.get_device_name(number))


def _map(address: str, nbytes: int) -> str:
    """Returns why the segment cannot be mapped, or ""."""
    try:
        segment = Segment.open(address, nbytes)
    except (SegmentError, OSError) as error:
        return getattr(error, "reason", None) or str(error)
    segment.memory[: len(MARK)] = MARK
    return ""


if __name__ == "__main__":
    main()
