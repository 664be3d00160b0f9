"""`lockstep report`: one file that loads nothing, of any run folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.dashboard import report
from tests.growing_run import GrowingRun
from tests.recordings import make_run

pytest.importorskip("plotly")


def data_of(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', path.read_text())
    assert found is not None
    return json.loads(found[1])


def test_the_report_has_everything_in_one_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    assert capfd.readouterr().out == f"{out}\n"
    html = out.read_text()
    page = html[: html.index("<script>")] + html[html.rindex("</script>") :]
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    shown = data_of(out)
    assert shown["run"]["step"] == 200
    assert any("1 failure survived" in line for line in shown["summary"])
    assert shown["logs"]["0"] == "worker 0 says hello\n"


def test_what_a_script_has_printed_and_named_cannot_break_out_of_its_place(tmp_path: Path) -> None:
    run, out = GrowingRun(tmp_path / "run</script><b>"), tmp_path / "report.html"
    evil = "</script><script>document.title = 'broken'</script><!--"
    run.log(0, evil)
    run.steps(2, {evil: 1.0})
    run.end(1, evil)
    main(["report", str(run.folder), "-o", str(out)])
    html = out.read_text()
    assert evil not in html
    assert data_of(out)["logs"]["0"].endswith(evil)
    assert html.count("</script>") == 3


def test_the_logs_of_workers_on_other_machines_are_not_taken_for_empty_ones(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", steps=5), tmp_path / "report.html"
    (run / "machines" / "b").mkdir(parents=True)
    (run / "workers").rename(run / "machines" / "b" / "workers")
    main(["report", str(run), "-o", str(out)])
    assert data_of(out)["logs"]["2"] == "worker 2 says hello\n"
    (run / "machines").rename(tmp_path / "of-another-machine")
    with open(run / "events.jsonl", "a") as events:
        events.write('{"time": 1763500000.0, "kind": "registered"}\n')
    main(["report", str(run), "-o", str(out)])
    shown = data_of(out)
    assert shown["logs"] == {}
    assert "The logs are in the run folders of its agents" in shown["logsNote"]


def test_of_many_workers_the_report_has_the_logs_of_the_dead_and_of_the_last_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_LOGS", 4)
    run = make_run(tmp_path / "run", workers=8)
    shown = report.report_data(run)
    assert set(shown["logs"]) == {"7", "8", "6", "5"}
    assert shown["logsNote"] == "the logs of 5 more workers are in the run folder"


def test_a_run_that_goes_on_and_a_torn_recording_make_a_report(tmp_path: Path) -> None:
    run, out = GrowingRun(tmp_path / "run"), tmp_path / "report.html"
    run.steps(20)
    for file in (run.folder / "recording" / "every-1-000001.jsonl", run.folder / "events.jsonl"):
        with open(file, "ab") as opened:
            opened.write(b'{"kind": "step", "step": 21, "spa')
    (run.folder / "recording" / "every-16-000001.jsonl").write_bytes(b"\xff\x00 no line\n" * 100)
    main(["report", str(run.folder), "-o", str(out)])
    shown = data_of(out)
    assert (shown["run"]["state"], shown["run"]["step"]) == ("running", 20)
    run.close()


def test_the_report_is_whole_whatever_plotly_contains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotly = tmp_path / "plotly.min.js"
    plotly.write_text("const page = '<title>Lockstep</title></body>';")
    monkeypatch.setattr(report, "plotly_file", lambda: plotly)
    html = report.report_html(report.report_data(make_run(tmp_path / "run", steps=5)))
    assert plotly.read_text() in html
    assert html.endswith("</script>\n</body>\n</html>\n")


def test_a_run_without_a_step_makes_a_report(tmp_path: Path) -> None:
    run, out = GrowingRun(tmp_path / "run"), tmp_path / "report.html"
    run.close()
    assert main(["report", str(run.folder), "-o", str(out), "--png", str(tmp_path / "pictures")]) == 0
    assert data_of(out)["steps"]["coarse"] == []


def test_pictures_are_written_for_papers(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    run, folder = make_run(tmp_path / "run"), tmp_path / "pictures"
    assert main(["report", str(run), "-o", str(tmp_path / "report.html"), "--png", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.png" for name in ("loss", "throughput", "breakdown", "workers", "timeline")
    }
    for path in folder.iterdir():
        pixels = image.imread(path)
        assert pixels.shape[1] == 1200
        assert pixels[..., :3].std() > 0.02, "the picture is empty"


def test_places_that_cannot_be_written_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=5)
    assert main(["report", str(run), "-o", str(tmp_path / "none" / "report.html")]) == 2
    assert "cannot be written to" in capfd.readouterr().err
    assert main(["report", str(tmp_path / "no-run")]) == 2
    assert "there is no run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("hidden", "command", "extra"),
    [
        ("plotly", ["report", "RUN", "-o", "OUT"], "dash"),
        ("starlette", ["dash", "RUN"], "dash"),
        ("uvicorn", ["dash", "RUN"], "dash"),
        ("matplotlib", ["report", "RUN", "-o", "OUT", "--png", "PNG"], "png"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, hidden: str, command: list[str], extra: str
) -> None:
    run = make_run(tmp_path / "run", steps=5)
    places = {"RUN": str(run), "OUT": str(tmp_path / "report.html"), "PNG": str(tmp_path / "pictures")}
    code = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == {hidden!r} else find(name)
from lockstep.__main__ import main
sys.exit(main({[places.get(word, word) for word in command]!r}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("\n") == 1
    assert f"the package {hidden}" in found.stderr
    assert f"pip install 'lockstep-ddp[{extra}]'" in found.stderr


def test_the_commands_import_no_torch_and_no_server(tmp_path: Path) -> None:
    code = "import sys; from lockstep.__main__ import main; main(['report', sys.argv[1], '-o', sys.argv[2]]); "
    code += "assert not {'torch', 'starlette', 'uvicorn', 'matplotlib', 'plotly'} & set(sys.modules)"
    command = [sys.executable, "-c", code, str(make_run(tmp_path / "run", steps=5)), str(tmp_path / "report.html")]
    subprocess.run(command, check=True, timeout=60)
