"""The reference names every public name, and docstrings say what every argument is for."""

from __future__ import annotations

import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
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


def test_every_public_name_has_a_docstring() -> None:
    assert not [name for name, value in public() if not (value.__doc__ or "").strip() and name not in OVERRIDDEN]


def test_docstrings_explain_every_argument() -> None:
    missing = []
    for name, value in public():
        is_made_by_users = not inspect.isclass(value) or not issubclass(value, Exception | Replica)
        if callable(value) and is_made_by_users and name not in OVERRIDDEN | INTERNAL:
            text = inspect.getdoc(value) or ""
            given = [each for each in inspect.signature(value).parameters.values() if each.kind is not each.VAR_KEYWORD]
            missing += [f"{name}({each.name})" for each in given if each.name != "self" and each.name not in text]
    assert not missing


def names_of_examples() -> dict[str, Any]:
    """What the examples of docstrings take for granted: a model, an optimizer, data, a loss."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(8, 2), torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 10)
    batch = data[:16]

    def loss(output: Any, target: Any) -> torch.Tensor:
        return loss(output(target[0]), target[1]) if isinstance(output, torch.nn.Module) else F.cross_entropy(output, target)

    public_names = {name: getattr(lockstep, name) for name in lockstep.__all__}
    return public_names | {
        "lockstep": lockstep,
        "torch": torch,
        "F": F,
        "Net": lambda: torch.nn.Linear(8, 2),
        "model": model,
        **dict.fromkeys(("optimizer", "opt"), opt),
        **dict.fromkeys(("scheduler", "sched"), sched),
        **dict.fromkeys(("dataset", "test_set"), data),
        "loader": torch.utils.data.DataLoader(data, batch_size=16),
        **dict.fromkeys(("first", "second"), batch),
        "x": batch[0],
        "y": batch[1],
        "loss": loss,
        "count_correct": lambda batch: {"correct": (model(batch[0]).argmax(1) == batch[1]).sum()},
    }


def code_of(docstring: str) -> list[str]:
    """The blocks after `::`."""
    return [textwrap.dedent(found) for found in re.findall(r"::\n\n((?:(?: {4,}.*)?\n?)+)", docstring)]


@pytest.mark.filterwarnings("ignore:.* imported torch's DistributedDataParallel before")  # modules of other tests did
@pytest.mark.parametrize("name", [name for name, value in public() if re.search(r">>>|::\n\n", value.__doc__ or "")])
def test_the_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    text, names = inspect.getdoc(dict(public())[name]) or "", names_of_examples()
    if name.startswith("Run."):
        names["run"] = lockstep.Run(names["model"], names["opt"], names["sched"], lanes=8)
    elif name.startswith("Replica.") or name == "replica_of":
        lockstep.replicate(names["model"])
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    shown: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=shown.append, clear_globs=False)
    for block in code_of(text):
        exec(compile(block, name, "exec"), example.globs)
    close_runs(example.globs)
    assert results.attempted or code_of(text)
    assert not results.failed, "".join(shown)
