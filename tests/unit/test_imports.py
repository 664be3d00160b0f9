"""Imports point one way; only some packages may use torch.distributed, the environment or the clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"
LEVEL = {
    "errors": 0,
    "plan": 1,
    "recording": 1,
    "world": 1,
    "launcher": 2,
    "cluster": 3,
    "comm": 2,
    "gradients": 3,
    "data": 3,
    "observe": 3,
    "track": 4,
    "elastic": 4,
    "checkpoint": 4,
    "replicas": 4,
    "engines": 4,
    "commands": 5,
    "training": 5,
    "integrations": 5,
    "doctor": 5,
    "dashboard": 5,
    "__main__": 6,
    "__init__": 7,
}

PURE = {
    "__future__",
    "array",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "json",
    "math",
    "re",
    "typing",
    "lockstep",
}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_imports_point_down() -> None:
    for path in SOURCE.rglob("*.py"):
        here = package_of(path)
        for module in imports(path):
            if module.startswith("lockstep."):
                there = module.split(".")[1]
                assert there == here or LEVEL[there] < LEVEL[here], f"{path.name} ({here}) imports {module}"


def test_only_comm_speaks_to_torch_distributed() -> None:
    for path in SOURCE.rglob("*.py"):
        if package_of(path) != "comm":
            assert not any(m.startswith("torch.distributed") for m in imports(path)), path


def test_plans_are_pure() -> None:
    for path in (SOURCE / "plan").glob("*.py"):
        for module in imports(path):
            assert module.split(".")[0] in PURE, (path, module)


def test_only_world_and_commands_read_the_environment() -> None:
    for path in SOURCE.rglob("*.py"):
        if package_of(path) not in ("world", "launcher", "cluster", "engines", "doctor"):
            assert "environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def test_importing_lockstep_loads_no_torch_and_starts_nothing() -> None:
    code = "import sys, threading, lockstep; lockstep.World.detect({}); "
    code += "assert 'torch' not in sys.modules; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_unknown_names_are_told_what_there_is() -> None:
    code = "import lockstep\ntry: lockstep.replicat\nexcept AttributeError as e: assert 'replicate' in str(e)\n"
    code += "else: raise SystemExit(1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
