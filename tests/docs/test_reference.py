"""The reference names every public name, and docstrings say what every argument is for."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lockstep
from lockstep.replicas.replicate import Replica
from tests.docs.code_blocks import ROOT, F, close_runs

REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))


def public() -> Iterator[tuple[str, Any]]:
    """All public functions, classes, methods and properties, by name."""
    classes = {name: getattr(lockstep, name) for name in lockstep.__all__} | {"Replica": Replica}
    for name, value in classes.items():
        yield name, value
        if inspect.isclass(value):
            for member in vars(value):
                if not member.startswith("_") and (callable(getattr(value, member)) or isinstance(vars(value)[member], property)):
                    yield f"{name}.{member}", inspect.getattr_static(value, member)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_the_reference_has_every_public_name(name: str) -> None:
    assert f":: lockstep.{name}\n" in REFERENCE


def test_the_reference_has_every_attribute_of_a_run() -> None:
    model = torch.nn.Linear(1, 1)
    with lockstep.Run(model, torch.optim.SGD(model.parameters())) as run:
        for name in vars(run):
            assert name.startswith("_") or f"py:attribute:: {name}\n" in REFERENCE, name


OVERRIDDEN = {"DistributedDataParallel.forward", "DistributedDataParallel.train"}  # documented by torch
INTERNAL = {"Replica.watch_outputs"}


def test_every_public_name_is_explained() -> None:
    """By a docstring, or by a row or a directive of the reference."""
    missing = [name for name, value in public() if not (value.__doc__ or "").strip()]
    assert not [name for name in missing if name not in OVERRIDDEN and f"`{name.split('.')[-1]}`" not in REFERENCE]


def test_every_argument_is_explained() -> None:
    missing = []
    for name, value in public():
        if (
            name in OVERRIDDEN | INTERNAL
            or not callable(value)
            or (inspect.isclass(value) and issubclass(value, Exception | Replica))
        ):
            continue
        text = (inspect.getdoc(value) or "") + (REFERENCE if name.startswith("World") else "")
        given = [each for each in inspect.signature(value).parameters.values() if each.kind is not each.VAR_KEYWORD]
        missing += [f"{name}({each.name})" for each in given if each.name != "self" and each.name not in text]
    assert not missing


@pytest.mark.parametrize("name", [name for name, value in public() if ">>>" in (value.__doc__ or "")])
def test_the_examples_of_docstrings_run(name: str) -> None:
    """In the given order, with the usual names: a model, an optimizer, a data set, and a run if the example does not make one."""
    value = dict(public())[name]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    names = {
        "lockstep": lockstep,
        "torch": torch,
        "F": F,
        "model": model,
        "module": model,
        "optimizer": optimizer,
        "opt": optimizer,
    }
    names |= {"scheduler": scheduler, "sched": scheduler, "dataset": data, "test_set": data, "loss_fn": F.cross_entropy}
    names["count_correct"] = lambda batch: {"correct": (model(batch[0]).argmax(1) == batch[1]).sum()}
    if name.startswith("Run.") and "lockstep.Run(" not in value.__doc__:
        names["run"] = lockstep.Run(model, optimizer, scheduler, lanes=8)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, name, None, None)
    shown: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=shown.append, clear_globs=False)
    close_runs(example.globs)
    assert results.attempted
    assert not results.failed, "".join(shown)
