"""The report of a run: one HTML file with the same charts as the page, made without a server. It loads nothing."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from lockstep.dashboard.log_parts import note_on_logs, read_log, workers_with_logs
from lockstep.dashboard.page_files import REPORT_MODULES, STATIC, plotly_file
from lockstep.dashboard.run_history import RunHistory
from lockstep.dashboard.watched_run import WatchedRun
from lockstep.recording.text import plural

_LOG_BYTES = 32 << 10
_LOGS = 256
_ALL_LOGS_BYTES = 2 << 20
_IMPORT = re.compile(r"^import [^;]+;\n", re.MULTILINE)
_STAR = re.compile(r"^import \* as (\w+) from \"\./([\w.]+)\";", re.MULTILINE)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def report_data(run_dir: Path) -> dict[str, Any]:
    """All that the report shows of a run, as plain data. The run may still go on, and its recording may be damaged.

    Raises:
        UsageError: There is no run in ``run_dir``.
    """
    run = WatchedRun(run_dir.absolute().name, run_dir)
    run.read_all()
    _, data = run.changes()
    with run.view() as view:
        logs, note = _logs(run_dir, view.history)
    return data | {"logs": logs, "logsNote": note, "made": time.strftime("%Y-%m-%d %H:%M")}


def _logs(run_dir: Path, history: RunHistory) -> tuple[dict[str, str], str]:
    """The ends of the logs of the workers, and what the report says about them.

    If there are too many workers, those that died are shown, then the members of the last generation, then the newest others.
    """
    found = workers_with_logs(run_dir)
    died = {worker for worker, life in history.workers.items() if life.state == "died"}
    kept = sorted(found, key=lambda worker: (worker not in died, worker not in history.members, -worker))[:_LOGS]
    nbytes = min(_LOG_BYTES, _ALL_LOGS_BYTES // max(1, len(kept)))
    parts = {worker: read_log(run_dir, worker, max_bytes=nbytes) for worker in sorted(kept)}
    left_out = f"the logs of {plural(len(found) - len(kept), 'more worker')} are in the run folder" if found[_LOGS:] else ""
    return {str(worker): part.text + part.unfinished for worker, part in parts.items() if part}, note_on_logs(run_dir) or left_out


def report_html(data: dict[str, Any]) -> str:
    """The report as one file.

    Raises:
        UsageError: plotly is not installed.
    """
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        '<link rel="stylesheet" href="static/page.css">': f"<style>\n{(STATIC / 'page.css').read_text()}</style>",
        '<script src="static/plotly.min.js" defer></script>': f"<script>{_for_script(plotly_file().read_text())}</script>",
        '<script type="module" src="static/page.js"></script>': "",
        "<title>Lockstep</title>": f"<title>{_for_html(data['run']['name'])}: report of a run</title>",
        "</body>": f'<script type="application/json" id="report-data">{embedded}</script>\n'
        f'<script type="module">\n{_for_script(join_modules())}</script>\n</body>',
    }
    page = (STATIC / "page.html").read_text()
    assert all(page.count(old) == 1 for old in parts)
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], page)  # at once: plotly may contain any of them


def join_modules() -> str:
    """The page's modules as one: without imports and exports. `import * as x` becomes an object of what the module exports."""
    found = []
    for name in REPORT_MODULES:
        text = (STATIC / name).read_text()
        for alias, module in _STAR.findall(text):
            names = _EXPORTED.findall((STATIC / module).read_text())
            found.append(f"const {alias} = {{ {', '.join(names)} }};\n")
        found.append(re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE))
    return "".join(found)


def _for_script(text: str) -> str:
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _for_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
