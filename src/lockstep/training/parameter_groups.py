"""Which parameters each optimizer updates, by name. A script may call ``opt.add_param_group`` in mid-training (fine-tuning).

An optimizer can load the state of another one only if both have the same groups. A worker that adopts a state may lack groups: its
script has not run the code that adds them, or never will because the run has passed that code.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lockstep.errors import UsageError

Groups = list[list[str]]
"""For each parameter group of an optimizer, the names of its parameters in the model."""


def read_groups(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> Groups:
    """Return the groups of ``optimizer``. All its parameters must be in ``named``."""
    names = {id(param): name for name, param in named}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def missing_groups(name: str, mine: Groups, theirs: Groups) -> Groups:
    """Return the groups that an optimizer with groups ``mine`` lacks to load a state with groups ``theirs``.

    Raises:
        UsageError: ``theirs`` is not ``mine`` with groups added at its end. ``name`` names the optimizer.
    """
    if theirs[: len(mine)] == mine:
        return theirs[len(mine) :]
    raise UsageError(
        f"{name} of this script updates {_describe(mine)}, and in the state that it shall load {_describe(theirs)}. "
        "Construct it with the parameters, in the groups, with which the run was begun; opt.add_param_group may add groups."
    )


def add_groups(optimizer: Optimizer, groups: Groups, named: Sequence[tuple[str, Tensor]]) -> None:
    """Add groups to ``optimizer``. The caller loads its state next, which has the hyperparameters of each group."""
    params = dict(named)
    for names in groups:
        optimizer.add_param_group({"params": [params[name] for name in names]})


def _describe(groups: Groups) -> str:
    counts = [f"{len(group)} parameter{'s' if len(group) > 1 else ''} from {group[0]}" for group in groups if group]
    return ", then ".join(counts) or "no parameters"
