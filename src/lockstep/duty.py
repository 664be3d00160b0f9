"""What is done between two steps, all workers together: when it is due, and that it may have to be done again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Moment:
    """The end of a committed step. ``wishes``: what every worker wished with it; empty where they have changed since."""

    step: int
    epoch: int
    ends_epoch: bool
    wishes: tuple[int, ...]


class Duty(Protocol):
    def look(self, now: Moment) -> bool:
        """Whether there is something to do; called after every step, with the same answer on every worker."""

    def act(self, now: Moment) -> Any:
        """Collective; again, with another moment, where a worker was lost. Returns plain data, the same everywhere."""

    def done(self, result: Any) -> None:
        """The act is over: what this worker remembers of it must depend on the result alone. It may be another worker's, where
        that one had completed the act and this one had not.
        """

    def end(self, step: int) -> None:
        """A loop has come to its end. Collective."""
