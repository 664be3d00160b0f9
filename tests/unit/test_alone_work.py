"""run.alone: what it announces to the agent, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import lockstep
from lockstep.elastic.worker_group import WorkerGroup
from lockstep.errors import UsageError
from lockstep.training.alone_work import AloneWork


def test_nested_work_is_announced_and_the_outer_work_again_after_it() -> None:
    sent: list[Any] = []
    link = SimpleNamespace(
        begin_alone=lambda what, limit_s: sent.append((what, round(limit_s))), end_alone=lambda: sent.append("end")
    )
    alone = AloneWork(cast(WorkerGroup, SimpleNamespace(link=link)))
    with pytest.raises(ValueError, match="disk"), alone.announce("saving", 100.0):
        with alone.announce("copying", 500.0):
            pass
        raise ValueError("disk")
    assert sent == [("saving", 100), ("copying", 500), ("saving", 100), "end"]


def test_without_an_agent_it_does_nothing_and_bad_arguments_get_a_sentence() -> None:
    model = torch.nn.Linear(1, 1)
    with lockstep.Run(model, torch.optim.SGD(model.parameters())) as run:
        with run.alone("saving"):
            pass
        for bad in (0, -1.0, float("inf"), float("nan"), cast(float, "1h")):
            with pytest.raises(UsageError, match="pass a positive number of seconds"), run.alone("saving", limit_s=bad):
                pass
        with pytest.raises(UsageError, match="say what this worker does"), run.alone(""):
            pass
