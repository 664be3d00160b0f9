"""user_frame: the line of the user's own code that an exception came through."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launcher.user_frame import user_frame


def raised_by(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """Run ``text`` as the main script at ``path``, and return what it raises."""
    path.write_text(text)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.syspath_prepend(str(path.parent))
    namespace: dict[str, Any] = {"torch": torch, "json": json}
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        exec(compile(text, str(path), "exec"), namespace)
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    return error


def test_a_mistake_inside_torch_or_the_standard_library_is_shown_at_the_line_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def fit():\n    torch.nn.Linear(2, 3)(torch.ones(5))\n\nfit()\n"
    found = user_frame(raised_by(text, tmp_path / "train.py", monkeypatch))
    assert (found.where, found.source) == ("train.py:2", "torch.nn.Linear(2, 3)(torch.ones(5))")
    assert found.place == f"RuntimeError at {tmp_path}/train.py:2"
    found = user_frame(raised_by("json.loads('{')\n", tmp_path / "other.py", monkeypatch))
    assert found.where == "other.py:1"


def test_a_module_of_the_users_own_is_shown_and_the_place_is_in_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_of_test.py").write_text("def forward():\n    raise ValueError('no')\n")
    text = "import own_model_of_test\nown_model_of_test.forward()\n"
    found = user_frame(raised_by(text, tmp_path / "train.py", monkeypatch))
    assert found.where.endswith("own_model_of_test.py:2")
    assert found.source == "raise ValueError('no')"
    assert found.place == f"ValueError at {tmp_path}/train.py:2"


def test_a_syntax_error_is_shown_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("x = 1\nthis is no python\n")
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\nthis is no python\n", str(tmp_path / "train.py"), "exec")
    found = user_frame(caught.value.with_traceback(None))
    assert (found.where, found.source) == ("train.py:2", "this is no python")


def test_an_exception_without_a_line_of_the_users_has_none() -> None:
    found = user_frame(ValueError("made, not raised"))
    assert (found.where, found.source, found.place) == ("", "", "")
