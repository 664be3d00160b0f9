"""Answers a keyword argument that a call does not have with the name to type instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from lockstep.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

BATCH_SIZE = (
    "global_batch is the number of samples that all workers together use in one step. batch_size in a DataLoader is the number "
    "that each worker uses, so that the result would depend on the number of workers. Pass global_batch={value}, or batch_size "
    "times the number of workers that it was chosen for."
)
"""The answer to ``batch_size=``, for calls that take ``global_batch``."""


def explain_unknown(call: str, answers: Mapping[str, str] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown keyword argument is a ``UsageError`` that names the nearest argument.

    Args:
        call: The call as users write it, such as "run.shard".
        answers: For names that people type: the sentence that explains what to type instead. "{value}" is replaced by the value.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        known = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in kwargs.items():
                if name not in parameters:
                    raise UsageError(f"{call} has no argument {name}=. {_answer(name, value, known, answers or {})}")
            return function(*args, **kwargs)

        return checked

    return decorate


def _answer(name: str, value: object, known: Sequence[str], answers: Mapping[str, str]) -> str:
    if name in answers:
        return answers[name].format(value=value)
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}=?" if near else f"Its arguments are: {', '.join(known)}."
