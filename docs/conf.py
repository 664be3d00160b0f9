"""Sphinx: `make docs` builds these pages into build/docs. Warnings are errors; the built site loads nothing from the network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lockstep

ROOT = Path(__file__).parents[1]

project = "Lockstep"
author = "the Lockstep authors"
copyright = "2026, the Lockstep authors"
version = release = lockstep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.programoutput",
]

# -- pages -----------------------------------------------------------------------------------------

source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings: list[str] = []
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# -- the reference, from docstrings ----------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True

# Every reference must resolve (-n), except to types that are not public names of lockstep: those of Python and torch (there is no
# network for intersphinx when this is built), and ours that only annotate.
nitpick_ignore_regex = [("py:.*", rf"(?!lockstep\.({'|'.join(lockstep.__all__)})\b).*")]


def setup(app: Any) -> None:
    """Napoleon (priority 500) takes what stands before a colon in a property's docstring for a type. Ours are sentences."""
    sentences: dict[str, list[str]] = {}

    def remember(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        if what in ("property", "attribute"):
            sentences[name] = list(lines)

    def restore(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        if what in ("property", "attribute"):
            lines[:] = sentences[name]

    app.connect("autodoc-process-docstring", remember, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)


# -- the program's own help, for the page on the command line --------------------------------------

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["COLUMNS"] = "100"

# -- the site --------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "Lockstep"
html_static_path = ["_static"]
html_css_files = ["lockstep.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {
        "color-brand-primary": "#0b5fb4",
        "color-brand-content": "#0b5fb4",
        "color-brand-visited": "#0b5fb4",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6cb2f7",
        "color-brand-content": "#6cb2f7",
        "color-brand-visited": "#6cb2f7",
    },
}
