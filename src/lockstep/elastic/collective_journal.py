"""Acts: where in a script, after its last commit, a worker is. Counted alike on every worker, so that two can be compared.

Between two commits every worker comes to the same sites in the same order: an evaluation, an exchange of logs, a task. At a site
it does something together with the others, or all of them pass. A collective action can be complete for one worker and broken for
another; that one must not repeat it alone, but needs its result. Results are kept until the next commit, which nobody reaches
before all have them.
"""

from __future__ import annotations

from typing import Any


class CollectiveJournal:
    def __init__(self) -> None:
        self.passed = 0
        """Sites since the last commit that this worker is through with."""
        self.inside = 0
        """The site that it is at, doing something; 0: at none."""
        self.results: dict[int, Any] = {}
        """What each action since the last commit gave."""

    def start_over(self, passed: int = 0) -> None:
        """A step was committed; or the state of one who had was received, at a place where it had passed so many sites."""
        self.passed, self.inside, self.results = passed, 0, {}

    def enter(self) -> None:
        self.inside = self.passed + 1

    def complete(self, result: Any) -> None:
        self.results[self.inside] = result
        self.passed, self.inside = self.inside, 0

    def skip(self) -> None:
        """At this site nobody has anything to do."""
        self.passed += 1
