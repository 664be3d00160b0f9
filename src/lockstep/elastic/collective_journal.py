"""CollectiveJournal: counts the collective points that a worker has passed since its last commit.

Between two commits every worker reaches the same collective points in the same order: an evaluation, an exchange of logged
values, a checkpoint. At each point all workers do something together, or all of them skip it. When a worker is lost, a point
can be complete for one worker and broken for another. The second worker must not repeat it alone: it receives the result of
the first. The journal keeps results until the next commit, and no worker commits before all workers have them.
"""

from __future__ import annotations

from typing import Any


class CollectiveJournal:
    """The collective points of one worker since its last commit, numbered from 1."""

    def __init__(self) -> None:
        self.passed = 0
        """How many collective points this worker has passed since the last commit."""
        self.inside = 0
        """The number of the collective point that this worker is in, or 0."""
        self.results: dict[int, Any] = {}
        """The result of each collective point since the last commit."""

    def reset(self, passed: int = 0) -> None:
        """Forget all points. Called after a commit, or after adopting the state of a worker that has passed ``passed`` points."""
        self.passed, self.inside, self.results = passed, 0, {}

    def enter(self) -> None:
        self.inside = self.passed + 1

    def complete(self, result: Any) -> None:
        self.results[self.inside] = result
        self.passed, self.inside = self.inside, 0

    def skip(self) -> None:
        """Count a collective point at which no worker has anything to do."""
        self.passed += 1
