"""The server of the page: which address answers what. Everything is read-only; who may ask is decided in access.py.

/                  the page
/static/...        its files, and plotly's JavaScript from its Python package
/api/runs          the list of runs
/api/stream        server-sent events: for each ``run`` everything once, then what changes
/api/logs          which workers have a log; /api/log: a part of one
/metrics           Prometheus text
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lockstep.dashboard.access import Access, AccessMiddleware
from lockstep.dashboard.log_parts import note_on_logs, read_log, workers_with_logs
from lockstep.dashboard.page_files import PAGE_FILES, STATIC, plotly_file
from lockstep.dashboard.prometheus_text import CONTENT_TYPE, prometheus_text
from lockstep.dashboard.run_list import RunList
from lockstep.dashboard.run_view import RunView
from lockstep.dashboard.watched_run import WatchedRun
from lockstep.dashboard.watched_runs import KEEP_S, WatchedRuns
from lockstep.recording.text import plural

_MAX_STREAMED = 12
_MAX_SCRAPED = 24
_SCRAPED_S = 900.0
"""A run is read on between scrapes, also if they are many minutes apart."""
_BEAT_S = 2.0
_PAUSE_S = 0.25
"""A stream sends at most this often."""
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""Of a worker, and of a position in a log. A number with thousands of digits would be an error for ``int``."""


class Server:
    """Answers for the runs of ``runs``. ``is_ending()``: streams end soon after it returns True."""

    def __init__(self, runs: RunList, access: Access, is_ending: Callable[[], bool]) -> None:
        self._runs, self._is_ending = runs, is_ending
        self._watched: WatchedRuns | None = None
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._list),
            Route("/api/stream", self._stream),
            Route("/api/logs", self._logs),
            Route("/api/log", self._log),
            Route("/metrics", self._metrics),
        ]
        self.app = AccessMiddleware(Starlette(routes=routes, lifespan=self._lifespan), access)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._watched = WatchedRuns(self._runs)
        yield
        await self._watched.close()

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "page.html")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "plotly.min.js":
            return FileResponse(plotly_file(), media_type="text/javascript", headers={"cache-control": "max-age=3600"})
        if name not in PAGE_FILES:
            return _not_found(f"There is no file {name!r}.")
        return FileResponse(STATIC / name, headers={"cache-control": "no-cache"})

    async def _list(self, request: Request) -> Response:
        entries = await asyncio.to_thread(self._runs.entries)
        facts = {"folder": self._runs.folder.name, "path": str(self._runs.folder), "single": self._runs.is_single}
        text = _json_text({**facts, "now": time.time(), "runs": [entry.to_json() for entry in entries]})
        return Response(text, media_type="application/json")

    async def _stream(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:_MAX_STREAMED]
        if not await self._opened(names):
            return _not_found("This run was removed, or its name is wrong.")
        is_short = request.query_params.get("view") == "compare"
        return StreamingResponse(
            self._messages(names, is_short), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _messages(self, names: list[str], is_short: bool) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        sent: dict[str, tuple[int, int, str] | None] = {}
        at: dict[str, float] = {}
        assert self._watched is not None
        while not self._is_ending():
            message: dict[str, Any] = {}
            for name in names:
                run = await self._watched.get(name)  # says too that somebody still looks at it
                if run is None:
                    if sent.get(name, ()) is not None:
                        sent[name] = message[name] = None
                    continue
                if run.version == sent.get(name) and time.monotonic() - at[name] < _BEAT_S:
                    continue
                sent[name], message[name] = await asyncio.to_thread(run.changes, sent.get(name))
                at[name] = time.monotonic()
                if is_short:
                    _shorten(message[name])
            if message:
                text = await asyncio.to_thread(_json_text, message)
                yield f"data: {text}\n\n"
            await asyncio.sleep(_PAUSE_S)
            await self._watched.changed(_PAUSE_S)

    async def _logs(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._runs.path, request.query_params.get("run", ""))
        if path is None:
            return JSONResponse({"workers": [], "note": "there is no such run any more"})
        workers, note = await asyncio.to_thread(lambda: (workers_with_logs(path), note_on_logs(path)))
        return JSONResponse({"workers": workers, "note": note})

    async def _log(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._runs.path, request.query_params.get("run", ""))
        worker, start = (_NUMBER.fullmatch(request.query_params.get(name, "-1")) for name in ("worker", "start"))
        if path is None or worker is None or start is None:
            return _not_found("There is no such log.")
        part = await asyncio.to_thread(read_log, path, int(worker[0]), int(start[0]))
        return _not_found(f"Worker {int(worker[0])} has no log.") if part is None else JSONResponse(asdict(part))

    async def _metrics(self, request: Request) -> Response:
        asked = request.query_params.getlist("run")
        if not asked:
            asked = await asyncio.to_thread(self._runs.names if self._runs.is_single else self._runs.running)
        names = list(dict.fromkeys(asked))
        runs = await self._opened(names[:_MAX_SCRAPED], _SCRAPED_S)
        text = await asyncio.to_thread(prometheus_text, _views(run for run in runs if run.is_current))
        unread = sum(not run.is_current for run in runs)
        text += f"# {plural(unread, 'run')} left out: still being read\n" if unread else ""
        if len(names) > _MAX_SCRAPED:
            text += f"# {plural(len(names) - _MAX_SCRAPED, 'run')} left out: this server shows {_MAX_SCRAPED} at once\n"
        return Response(text.encode(errors="replace"), headers={"content-type": CONTENT_TYPE})

    async def _opened(self, names: list[str], keep_s: float = KEEP_S) -> list[WatchedRun]:
        """Those of these runs that exist. They are read as far as possible in a few seconds."""
        assert self._watched is not None
        found = [await self._watched.get(name, keep_s) for name in names]
        runs = [run for run in found if run is not None]
        await self._watched.read(runs)
        return runs


def _views(runs: Iterable[WatchedRun]) -> Iterator[tuple[RunView, str]]:
    """The views one after the other, and no more than one at a time kept from changing."""
    for run in runs:
        with run.view() as view:
            yield view, run.state


def _json_text(value: Any) -> str:
    """In ASCII: what Python reads of damaged files may have no form in UTF-8."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _shorten(changes: dict[str, Any]) -> None:
    """Leave out what the comparison of runs does not show."""
    for group in [group for tier in ("coarse", "fine") for group in (changes["steps"] or {}).get(tier, ())]:
        del group["w"], group["ph"]
    changes |= {"workers": [], "lives": {}, "pauses": [], "entries": []}


def _not_found(sentence: str) -> Response:
    return PlainTextResponse(f"{sentence}\n", status_code=404)
