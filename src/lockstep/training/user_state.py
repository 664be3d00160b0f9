"""UserState: ``run.state``, the user's own variables, which every worker holds alike. Part of the state of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from lockstep.comm.plain_state import pack
from lockstep.errors import UsageError


class UserState(MutableMapping[str, Any]):
    """A mapping from names to plain values and tensors. ``is_settable()`` says whether the script may change it now."""

    def __init__(self, is_settable: Callable[[], bool]) -> None:
        self._values: dict[str, Any] = {}
        self._is_settable = is_settable

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

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
        self._values = dict(values)

    def _require_settable(self, call: str) -> None:
        if not self._is_settable():
            raise UsageError(
                f"{call} was called before the step was committed. The loop body runs once per lane, so the value would depend on "
                "the number of workers. Set it after opt.step(), under `if run.committed:`, or after the loop."
            )
