"""`lockstep run`: which words belong to lockstep and which to the script. Wrong arguments: tests/process/test_launch.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.__main__ import _parser
from lockstep.errors import UsageError
from lockstep.launcher.command_line import read_entrypoint


@pytest.mark.parametrize(
    ("words", "script", "module", "args"),
    [
        (["train.py"], "train.py", None, ()),
        (["-n", "4", "train.py", "--lr", "3", "-n", "5"], "train.py", None, ("--lr", "3", "-n", "5")),
        (["-n4", "--run-dir=x", "--ledger", "train.py", "--help"], "train.py", None, ("--help",)),
        (["--grace", "3", "train.py", "-m", "json", "--", "x"], "train.py", None, ("-m", "json", "--", "x")),
        (["--", "train.py", "--lr", "3"], "train.py", None, ("--lr", "3")),
        (["-n", "4", "--", "train.py", "--", "x"], "train.py", None, ("--", "x")),
        (["train.py", "a b", "-h", "--no-respawn", "-1"], "train.py", None, ("a b", "-h", "--no-respawn", "-1")),
        (["-m", "json"], None, "json", ()),
        (["-n", "4", "-m", "json.tool", "--lr", "3", "-n", "5", "-h"], None, "json.tool", ("--lr", "3", "-n", "5", "-h")),
        (["-m", "json", "--", "x", "-m"], None, "json", ("--", "x", "-m")),
    ],
)
def test_what_follows_the_script_or_module_belongs_to_it(
    words: list[str], script: str | None, module: str | None, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    given = _parser().parse_args(["run", *words])
    found = read_entrypoint(given)
    assert (found.script, found.module, found.args) == (script, module, args)
    assert found.sys_path_0 == str(tmp_path)
    assert given.n == (4 if any(word.startswith("-n") for word in words[:1]) else None)
    assert not given.no_respawn


def test_an_unknown_option_is_refused_even_if_a_script_follows() -> None:
    with pytest.raises(UsageError, match=r"there is no option --momentum. Options before the script belong to lockstep"):
        _parser().parse_args(["run", "--momentum", "3", "train.py"])


def test_help_lists_all_commands_and_options_and_needs_no_torch() -> None:
    code = "import sys; from lockstep.__main__ import main\ntry: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    for words, expected in (([], ["run", "scale", "checkpoint"]), (["run"], ["--hang-timeout", "-m", "script"])):
        done = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in expected)
