"""The server of the page as a process: what it answers, to whom, and how it begins and ends."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.__main__ import main
from tests.dash_server import DashServer, dash
from tests.growing_run import GrowingRun
from tests.recordings import make_run

for needed in ("starlette", "uvicorn", "plotly"):
    pytest.importorskip(needed)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., DashServer]]:
    with ExitStack() as servers:
        yield lambda folder, *options: servers.enter_context(dash(folder, *options, note=tmp_path / "dash.txt"))


def test_all_that_the_page_needs_is_answered(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", ended=False)
    server = serve(tmp_path / "runs", "--port", "0")
    status, page, headers = server.ask(f"/?token={server.token}")
    assert status == 200
    assert "<title>Lockstep</title>" in page
    assert "http" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert [run["name"] for run in server.get("/api/runs")["runs"]] == ["b", "a"]
    assert server.get("/api/logs?run=a") == {"workers": [0, 1, 2, 3, 4], "note": ""}
    assert server.get("/api/log?run=a&worker=2")["text"] == "worker 2 says hello\n"
    message = server.messages("run=a&run=b", 1)[0]
    assert set(message) == {"a", "b"}
    assert message["a"]["run"]["step"] == 200
    for path in ("/static/page.js", "/static/page.css", "/static/plotly.min.js"):
        status, _, headers = server.ask(path)
        assert status == 200, path
    assert server.ask(f"/metrics?run=a&token={server.token}")[1].count('lockstep_steps_total{run="a"} 200\n') == 1


def test_who_has_no_token_gets_nothing_but_a_sentence(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    server = serve(make_run(tmp_path / "run"), "--port", "0")
    for path in ("/", "/api/runs", "/api/stream?run=run", "/api/logs?run=run", "/api/log?run=run&worker=0", "/metrics", "/none"):
        for token in ("", "x", server.token[:-1]):
            status, body, _ = server.ask(path + ("&" if "?" in path else "?") + f"token={token}")
            assert (status, body.count("\n")) == (403, 1), path
    bearer = {"Authorization": f"Bearer {server.token}"}
    assert server.ask("/metrics", headers=bearer)[0] == 200
    assert server.ask("/metrics", headers={**bearer, "Host": "evil.example"})[0] == 403
    assert server.ask("/metrics", method="POST", headers=bearer)[0] == 405


NOT_FOUND = [
    *("/static/../page_files.py", "/static/..%2fpage_files.py", "/static/page.py", "/static/%00"),
    *("/api/log?run=../run&worker=0", "/api/log?run=run&worker=../0", "/api/log?run=run&worker=9999999999999999999999"),
    *("/api/log?run=run&worker=" + "1" * 5000, "/api/log?run=run&worker=0&start=" + "1" * 5000),
    *("/api/log?run=run&worker=%C2%B2", "/api/log?run=run&worker=0&start=x", "/api/stream?run=none", "/api/stream"),
]


@pytest.mark.parametrize("path", NOT_FOUND, ids=lambda path: path[:60])
def test_what_there_is_not_is_not_found(tmp_path: Path, serve: Callable[..., DashServer], path: str) -> None:
    server = serve(make_run(tmp_path / "run", steps=5), "--port", "0")
    status, body, _ = server.ask(path + ("&" if "?" in path else "?") + f"token={server.token}")
    assert status == 404, body
    assert "Traceback" not in server.said()


def test_text_that_is_no_unicode_is_answered(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    run = GrowingRun(tmp_path / "runs" / "a")
    run.event("command", words=["train.py", "\udc80"])
    run.steps(3, {"\udc80": 1.0})
    make_run(tmp_path / "runs" / "b\udc80", steps=3)
    server = serve(tmp_path / "runs", "--port", "0")
    assert [each["name"] for each in server.get("/api/runs")["runs"]] == ["b\udc80", "a"]
    assert "\udc80" in server.messages("run=a", 1)[0]["a"]["run"]["values"]
    assert server.ask(f"/metrics?run=a&token={server.token}")[0] == 200
    assert main(["report", str(tmp_path / "runs" / "b\udc80"), "-o", str(tmp_path / "report.html")]) == 0
    assert "Traceback" not in server.said()
    run.close()


def test_a_run_may_be_asked_for_twice(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    for name in "ab":
        make_run(tmp_path / "runs" / name, steps=5)
    server = serve(tmp_path / "runs", "--port", "0")
    for query in ("run=a&run=a", "run=a&run=b", "run=b&run=a"):
        status, text, _ = server.ask(f"/metrics?{query}&token={server.token}")
        assert status == 200
        assert text.count('lockstep_steps_total{run="a"} 5\n') == 1


def test_metrics_say_how_many_runs_they_leave_out(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    runs = [GrowingRun(tmp_path / "runs" / f"{number:02d}", workers=1) for number in range(26)]
    server = serve(tmp_path / "runs", "--port", "0")
    text = server.ask(f"/metrics?token={server.token}")[1]
    assert text.count("lockstep_running{") == 24
    assert text.endswith("# 2 runs left out: this server shows 24 at once\n")
    for run in runs:
        run.close()


def test_a_comparison_shows_the_runs_that_there_are(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    make_run(tmp_path / "runs" / "a", steps=5)
    server = serve(tmp_path / "runs", "--port", "0")
    message = server.messages("run=a&run=gone", 1)[0]
    assert message["gone"] is None
    assert message["a"]["run"]["step"] == 5


def test_a_single_run_that_was_removed_is_not_found(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    server = serve(make_run(tmp_path / "run", steps=5), "--port", "0")
    shutil.rmtree(tmp_path / "run")
    status, body, _ = server.ask(f"/api/stream?run=run&token={server.token}")
    assert (status, body) == (404, "This run was removed, or its name is wrong.\n")
    assert server.get("/api/runs")["runs"][0]["state"] == "removed"
    assert server.ask(f"/metrics?token={server.token}")[0] == 200
    assert "Traceback" not in server.said()


def test_a_run_that_goes_on_is_sent_in_increments(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    run = GrowingRun(tmp_path / "run")
    run.steps(2000)
    server = serve(run.folder, "--port", "0")
    whole, *_ = server.messages("run=run", 1)
    assert whole["run"]["reset"]
    assert len(json.dumps(whole["run"])) > 100_000
    with run.going_on():
        later = server.messages("run=run", 3)
    assert not later[1]["run"]["reset"]
    assert len(json.dumps(later[1]["run"])) < 10_000
    assert later[-1]["run"]["run"]["step"] >= 2001
    run.close()


def test_the_address_stays_with_a_token_file(tmp_path: Path) -> None:
    run, file = make_run(tmp_path / "run", steps=5), tmp_path / "token"
    with dash(run, "--port", "0", "--token-file", str(file), note=tmp_path / "first.txt") as first:
        token = first.token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with dash(run, "--port", "0", "--token-file", str(file), note=tmp_path / "second.txt") as second:
        assert second.token == token


def test_each_start_has_another_token_and_finds_a_free_port(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    with dash(run, note=tmp_path / "first.txt") as first, dash(run, note=tmp_path / "second.txt") as second:
        assert first.port != second.port
        assert first.token != second.token
        assert len(first.token) >= 32


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_while_pages_are_open(tmp_path: Path, number: int) -> None:
    run = make_run(tmp_path / "run", steps=50)
    with dash(run, "--port", "0", note=tmp_path / "dash.txt") as server:
        page = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        page.request("GET", f"/api/stream?run=run&token={server.token}")
        page.getresponse().readline()
        assert server.end(number) in (0, -number)
        page.close()
        assert "Traceback" not in server.said()
        assert server.said().count("\n") == 1, server.said()


def test_another_address_than_loopback_is_served_with_a_warning(tmp_path: Path, serve: Callable[..., DashServer]) -> None:
    server = serve(make_run(tmp_path / "run", steps=5), "--port", "0", "--host", "0.0.0.0")
    assert "not encrypted" in server.said()
    assert server.ask("/")[0] == 403


def test_wrong_arguments_are_explained_in_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    open_token = tmp_path / "token"
    open_token.write_text("0" * 64)
    open_token.chmod(0o644)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    binary.chmod(0o600)
    with dash(run, "--port", "0", note=tmp_path / "dash.txt") as server:
        cases = {
            ("--port", str(server.port)): "cannot be served at",
            ("--port", "99999"): "up to 65535",
            ("--host", "no.such.host.invalid"): "cannot be served at",
            ("--token-file", str(open_token)): "chmod 600",
            ("--token-file", str(binary)): "has no token",
            ("--token-file", str(tmp_path)): "Is a directory",
        }
        for options, expected in cases.items():
            command = [sys.executable, "-m", "lockstep", "dash", str(run), *options]
            found = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "src"})
            assert found.returncode == 2, found.stderr
            assert expected in found.stderr
            assert found.stderr.count("\n") == 1
