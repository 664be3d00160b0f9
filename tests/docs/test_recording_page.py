"""The page on the recording has every kind, field and phase that the sources write."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

from lockstep.plan.membership_events import Event
from lockstep.recording.kinds import KINDS
from lockstep.recording.records import PHASES, StepRecord
from lockstep.recording.stragglers import Straggler
from tests.docs.code_blocks import ROOT

PAGE = (ROOT / "docs" / "reference" / "recording.md").read_text()
WRITES = re.compile(r"""(?:record|_record)\(\s*"([a-z ]+)",""")


def test_every_kind_that_the_sources_write_is_known() -> None:
    sources = [*(ROOT / "src" / "lockstep" / "launcher").glob("*.py"), *(ROOT / "src" / "lockstep" / "cluster").glob("*.py")]
    written = {kind for source in sources for kind in WRITES.findall(source.read_text())}
    assert written >= {"command", "begin", "end", "exited", "verdict", "machine lost"}
    assert written <= set(KINDS)
    assert set(KINDS) - written == {"step", "pause", "metrics"}


def test_the_page_has_every_kind_field_and_phase() -> None:
    fields = [field.name for each in (StepRecord, Straggler) for field in dataclasses.fields(each)]
    events = [kind for kind in KINDS if kind not in ("step", "pause", "metrics")]
    names = [*events, *PHASES, *(each.__name__ for each in get_args(Event))]
    for name in (*names, *(field for field in fields if field != "kind")):
        assert f"`{name}`" in PAGE, name
    for kind in ("step", "pause", "metrics"):
        assert f"### {kind}\n" in PAGE
