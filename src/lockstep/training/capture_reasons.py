"""Why a function is not captured, in words: a recording that has failed, and calls that never repeat. No state."""

from __future__ import annotations

from typing import Any

from lockstep.gradients.cuda_graph import CannotRecord
from lockstep.training.call_signature import CannotTakeApart
from lockstep.training.captured_update import describe_settings


def describe_failure(error: Exception) -> str:
    """Return why a recording has failed. The text of an error that nobody has foreseen is cut after its first line."""
    if isinstance(error, (CannotRecord, CannotTakeApart)):
        return str(error)
    return f"recording it failed ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ") + ")"


def describe_difference(before: Any, after: Any) -> str:
    """Return what differs in the keys of two calls."""
    for (what, old), (_, new) in zip(before, after, strict=True):
        if old == new:
            continue
        if what == "the hyperparameters":
            return describe_settings(old, new)
        if what == "the variables":
            old_values = dict(old)
            name = next((name for name, value in new if old_values.get(name, value) != value), "a variable")
            return f"it reads `{name}`, which is another one in each call. Pass {name} as an argument, if it is a tensor"
        if what == "the arguments":
            return "its arguments have other shapes or values in each call. Pad batches to a few shapes, pass numbers as tensors"
        if what == "the gradients":
            return "the gradients lie elsewhere in each call. Capture the function that calls backward() too"
        return f"{what} changed in each call"
    return "each call differs"
