"""Finds out whether a CUDA device still works after a failure: its streams come to an end, and a small operation succeeds.

A CUDA call may block for ever on a device that is broken, so all of this happens in a thread of its own, which is left alone if it
does not answer in time. Knows nothing of other workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from lockstep.errors import DeviceError

DRAIN_S = 10.0
"""How long the operations of a broken generation may take to end. Those of NCCL have been aborted; the others are the script's."""


def require_working(device: torch.device, streams: Sequence[torch.cuda.Stream], limit_s: float = DRAIN_S) -> None:
    """Block until ``streams`` and the current stream have nothing left to do, and a small operation has succeeded.

    Raises:
        DeviceError: They have not within ``limit_s``, or CUDA reports an error.
    """
    begun = [*streams, torch.cuda.current_stream(device), torch.cuda.default_stream(device)]
    failed = in_time(lambda: _use(device, begun), limit_s)
    if failed is None:
        raise DeviceError(
            f"{device} has not ended the operations of a broken generation within {limit_s:g} s, so this process cannot use it any "
            "more."
        )
    if failed:
        raise DeviceError(f"{device} cannot be used by this process any more: {failed}")


def in_time(action: Callable[[], object], limit_s: float) -> str | None:
    """Call ``action()`` in a thread. Returns the first line of its error, "" for none, None if it did not return in time."""
    errors: list[str] = []
    ended = threading.Event()

    def run() -> None:
        try:
            action()
        except torch.OutOfMemoryError:
            pass  # the device answers
        except RuntimeError as error:
            errors.append((str(error).splitlines() or [type(error).__name__])[0][:300])
        ended.set()

    threading.Thread(target=run, name="lockstep-device-check", daemon=True).start()
    if not ended.wait(limit_s):
        return None
    return errors[0] if errors else ""


def _use(device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams:
        stream.synchronize()
    with torch.cuda.device(device):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.ones(1, device=device).add_(1).cpu()
