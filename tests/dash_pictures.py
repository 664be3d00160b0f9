"""Makes the pictures of docs/howto/dashboard.md: trains two small runs, loses a worker, and photographs the page as it is.

    python -m tests.dash_pictures /home/ada/digits docs/images

The first argument is the folder in which the runs are trained: pictures show its path. It must be empty or missing. The second is
where the pictures go. It takes two minutes on two cores, and needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lockstep.__main__ import main as lockstep
from lockstep.launcher.run_status import last_recorded_step
from tests.browser import browser, picture
from tests.dash_server import dash
from tests.fork_server import ROOT
from tests.process.test_dash_browser import CHARTS, Page
from tests.waiting import wait_until

SCRIPT = ROOT / "tests" / "scripts" / "pictured.py"
EVEN, UNEVEN = "lr-0.002", "lr-0.01"
TALL = 3200
"""The height of the window, so that all charts are drawn at once."""
AT_TOP = "return scrollY === 0 && document.querySelector('.top').getBoundingClientRect().top === 0"


def train(folder: Path, name: str, steps: int, **settings: str) -> subprocess.Popen[bytes]:
    """Start a run in ``folder``, with checkpoints of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    env |= {"PICTURED_STEPS": str(steps), "PICTURED_LR": name.removeprefix("lr-")} | settings
    (folder / name).mkdir(parents=True)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "4", "--run-dir", str(folder / "lockstep-runs" / name), str(SCRIPT)]
    return subprocess.Popen(command, cwd=folder / name, env=env)


def wait_for_step(run_dir: Path, step: int) -> None:
    wait_until(lambda: last_recorded_step(run_dir) >= step, f"step {step} of {run_dir.name}", 180.0)


def photograph(folder: Path, images: Path, url: str) -> None:
    """Take pictures of the run that goes on, then of both runs."""
    wanted = [
        ("dash_light", "", {}, "body", "#timeline"),
        ("dash_workers", "", {}, "#workers", "#logs"),
        ("dash_dark", "", {"dark": True}, "body", "#heat"),
        ("dash_phone", "", {"width": 380, "phone": True}, "body", "#throughput"),
        ("dash_compare", f"&run={EVEN}", {}, "body", ".below"),
    ]
    for name, more, settings, begin, end in wanted:
        with browser(folder / f"profile-{name}", **{"width": 1280, "height": TALL} | settings) as driver:
            driver.get(f"{url}&run={UNEVEN}{more}")
            shown = Page(driver)
            for chart in CHARTS if not more else ("#compare-0", "#compare-1", "#compare-2", "#compare-3"):
                shown.wait_for_chart(chart)
            if not more:
                shown.wait(lambda shown=shown: "step 300 of" in shown.text(".log"), "the log is shown")
            shown.run("scrollTo(0, 0)")  # the header stays at the top of the window
            shown.wait(lambda shown=shown: shown.run(AT_TOP), "the header is at the top of the page")
            picture(driver, images / f"{name}.png", begin=begin, end=end)


def main(folder: Path, images: Path) -> None:
    assert not folder.exists() or not any(folder.iterdir()), f"{folder} is not empty"
    runs = folder / "lockstep-runs"
    assert train(folder, EVEN, 400).wait(240) == 0
    uneven = train(folder, UNEVEN, 2000, PICTURED_SLOW="2")
    with ExitStack() as stack:
        stack.callback(uneven.wait, 60)
        stack.callback(uneven.send_signal, signal.SIGTERM)
        wait_for_step(runs / UNEVEN, 230)
        os.kill(int((folder / UNEVEN / "pid-3").read_text()), signal.SIGKILL)
        wait_for_step(runs / UNEVEN, 400)
        server = stack.enter_context(dash(runs, "--port", "0", note=folder / "dash.txt"))
        photograph(folder, images, server.url)
    lockstep(["report", str(runs / UNEVEN), "-o", str(folder / "report.html"), "--png", str(folder / "png")])
    shutil.copy(folder / "png" / "workers.png", images / "report_workers.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
