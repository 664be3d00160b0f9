"""UserState: ``run.state``, the user's own variables, which every worker holds alike. Part of the state of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from lockstep.comm.plain_state import pack
from lockstep.errors import UsageError


class UserState(MutableMapping[str, Any]):
    """A mapping from names to plain values and tensors. ``is_settable()`` says whether the script may change it now.

    The script gets the values themselves, so it can change a list, a dict or a tensor in place. If it reads one while the state is
    not settable, ``require_unchanged`` finds such a change at the end of the lane.
    """

    def __init__(self, is_settable: Callable[[], bool]) -> None:
        self._values: dict[str, Any] = {}
        self._is_settable = is_settable
        self._read: dict[str, Any] = {}
        """The outlines of the values that the script has read in the current lane."""

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, (Tensor, list, tuple, dict)) and name not in self._read and not self._is_settable():
            self._read[name] = _outline(value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._require_settable(f"run.state[{name!r}] = ...")
        if not isinstance(name, str):
            raise UsageError(f"run.state[{name!r}]: the name is a {type(name).__name__}. Use a str.")
        pack(value, f"run.state[{name!r}]")  # raises if it is not plain
        self._values[name] = copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)

    def __delitem__(self, name: str) -> None:
        self._require_settable(f"del run.state[{name!r}]")
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"run.state: {self._values!r}"

    def capture(self) -> dict[str, Any]:
        """Return the values: the live ones, not copies."""
        return dict(self._values)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Adopt what ``capture`` returned, on this worker or another one."""
        self._values, self._read = dict(values), {}

    def start_step(self) -> None:
        """A step begins: forget what was read in a lane that did not end."""
        self._read = {}

    def require_unchanged(self) -> None:
        """Require that the script has changed no value in place that it has read in this lane. Called when the lane ends.

        Raises:
            UsageError: It has.
        """
        read, self._read = self._read, {}
        for name, outline in read.items():
            if _outline(self._values[name]) != outline:
                raise _too_early(f"run.state[{name!r}] was changed in place")

    def _require_settable(self, call: str) -> None:
        if not self._is_settable():
            raise _too_early(f"{call} was called")


def _too_early(what: str) -> UsageError:
    return UsageError(
        f"{what} before the step was committed. The loop body runs once per lane, so the value would depend on the number of "
        "workers. Change it after opt.step(), under `if run.committed:`, or after the loop."
    )


def _outline(value: Any) -> Any:
    """Return a value that differs from an earlier one if plain data was changed in place. It does not read tensors."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (list, tuple)):
        return [_outline(each) for each in value]
    if isinstance(value, dict):
        return {key: _outline(each) for key, each in value.items()}
    return value
