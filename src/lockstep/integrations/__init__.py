"""Lockstep in training frameworks. Each module needs its framework, and is imported when it is first used."""

from __future__ import annotations

import importlib
from types import ModuleType

_FRAMEWORKS = ("lightning",)


def __getattr__(name: str) -> ModuleType:
    if name not in _FRAMEWORKS:
        raise AttributeError(f"module 'lockstep.integrations' has no attribute {name!r}; it has {', '.join(_FRAMEWORKS)}")
    return importlib.import_module(f"lockstep.integrations.{name}")
