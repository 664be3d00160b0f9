"""The files of the page, and where plotly's Python package has its JavaScript."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lockstep.errors import UsageError

STATIC = Path(__file__).parent / "static"
REPORT_MODULES = (
    *("format.js", "store.js", "theme.js", "grouping.js", "charts.js", "timeline.js", "sections.js", "run_page.js", "logs.js"),
    *("controls.js", "report.js"),
)
"""The JavaScript of the report: each file imports only files before it."""
PAGE_FILES = frozenset({"page.css", "page.js", "stream.js", "runs_page.js", *REPORT_MODULES})


def plotly_file() -> Path:
    """The JavaScript of the installed package plotly.

    Raises:
        UsageError: plotly is not installed.
    """
    found = importlib.util.find_spec("plotly")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [Path(folder) / "package_data" / "plotly.min.js" for folder in folders]
    for file in files:
        if file.exists():
            return file
    raise missing("plotly")


def missing(package: str, extra: str = "dash") -> UsageError:
    """The error for a package that is not installed."""
    needs = {"dash": "`lockstep dash` and `lockstep report` need", "png": "`lockstep report --png` needs"}[extra]
    return UsageError(f"{needs} the package {package}, which is not installed. Install it: pip install 'lockstep-ddp[{extra}]'")
