"""Cluster engines: each starts one head and an agent per machine, with an address and a token. No engine knows membership.

``lockstep.engines.ray`` has a function for Python programs. It is imported when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_IN_PYTHON = ("ray",)


def __getattr__(name: str) -> ModuleType:
    if name not in _IN_PYTHON:
        raise AttributeError(f"module 'lockstep.engines' has no attribute {name!r}; it has {', '.join(_IN_PYTHON)}")
    return importlib.import_module(f"lockstep.engines.{name}")
