"""How many threads a worker uses: what the user has set, or an equal share of the cores."""

from __future__ import annotations

import os

import pytest

from lockstep.launcher.environment import threads_per_worker


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (16, 1)])
def test_workers_share_the_cores_that_the_agent_may_use(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_worker(workers, {}) == threads


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 4),
    ],
)
def test_what_the_user_has_set_counts(environ: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_worker(2, environ) == threads
