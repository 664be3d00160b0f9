"""Mlflow: an MLflow tracking server or database, by the package mlflow or mlflow-skinny."""

from __future__ import annotations

import hashlib
import posixpath
import re
import time
from pathlib import Path
from typing import Any

from lockstep.observe.notice import print_notice
from lockstep.world import default_variables

_TAG = "lockstep.run"
_MAX_METRICS = 1000
"""How many metrics MLflow takes at a time."""
_MAX_NAME_CHARS = 250
_CLIENT_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "40",
}
"""What the client reads in each call. By default it tries for minutes, while all workers wait."""
_LIMIT_S = 200.0
"""How long several calls may take together: less than the agent waits for a tracker."""


class Mlflow:
    """Sends logged values to MLflow as metrics of one run.

    All steps of an exchange are one transaction of a database or a server. MLflow's old file store writes each metric by itself:
    there a step can be incomplete, if the worker is killed while it writes it. So can a step with more than 1000 values anywhere.
    Characters of a name that MLflow refuses are replaced by "_", and the name gets a suffix, so that no two names become the same.

    While a worker opens this tracker or writes to it, a request to a server takes 20 s at most and is tried twice. The variables
    MLFLOW_HTTP_REQUEST_TIMEOUT and MLFLOW_HTTP_REQUEST_MAX_RETRIES change that, if they are set.

    Args:
        experiment: The name of the experiment. It is made if there is none.
        uri: The tracking server or database. Default: a SQLite database ``mlflow.db`` in the folder of the run's curves.
        name: The name of the run. Default: the name of the run's curves.

    Example:
        >>> run = lockstep.Run(model, opt, track=[lockstep.track.Mlflow(experiment="small", uri="http://localhost:5000")])
    """

    name = "mlflow"
    packages: tuple[str, ...] = ("mlflow",)

    def __init__(self, experiment: str = "lockstep", uri: str | None = None, *, name: str | None = None) -> None:
        self._experiment, self._uri, self._name = experiment, uri, name
        self.packages = ("mlflow", "sqlalchemy", "alembic") if uri is None else ("mlflow",)
        self._client: Any = None
        """None if this tracker is not open, or if a call has failed: then ``close`` does not wait for the server again."""
        self._run = ""
        self._last = 0
        self._pending: list[list[Any]] = []  # the metrics of each step
        self._names: dict[str, str] = {}  # logged name -> the name in MLflow

    @property
    def place(self) -> tuple[str | None, str]:
        """Where it writes, to compare trackers."""
        return None if self._uri is None else self._uri.rstrip("/"), self._experiment

    def open(self, run_id: str, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        self._client, self._pending = None, []
        until = time.monotonic() + _LIMIT_S
        if self._uri is None:
            folder.mkdir(parents=True, exist_ok=True)
        with default_variables(_CLIENT_LIMITS):
            client = MlflowClient(tracking_uri=self._uri or f"sqlite:///{folder / 'mlflow.db'}")
            self._run = self._run_of(client, run_id)
            self._last = self._last_step_in(client, until)
        self._client = client

    def _run_of(self, client: Any, run_id: str) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = str(experiment.experiment_id if experiment is not None else client.create_experiment(self._experiment))
        found = client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run_id}'")
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        made = client.create_run(experiment_id, tags={_TAG: run_id}, run_name=self._name or run_id)
        return str(made.info.run_id)

    def _last_step_in(self, client: Any, until: float) -> int:
        last = 0
        for name in client.get_run(self._run).data.metrics:
            _require_time(until)
            last = max([last, *(metric.step for metric in client.get_metric_history(self._run, name))])
        return last

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._pending.append([Metric(self._accepted(name), value, now_ms, step) for name, value in values.items()])

    def _accepted(self, name: str) -> str:
        """Return the name as MLflow accepts it. Says once if it differs."""
        if name not in self._names:
            self._names[name] = accepted = accepted_name(name)
            if accepted != name:
                print_notice(f"the tracker mlflow logs {name!r:.80} as {accepted!r:.80}: MLflow refuses the name.")
        return self._names[name]

    def flush(self) -> None:
        client, self._client = self._client, None
        until = time.monotonic() + _LIMIT_S
        with default_variables(_CLIENT_LIMITS):
            for batch in _batches(self._pending):
                _require_time(until)
                client.log_batch(self._run, metrics=batch)
        self._client, self._pending = client, []

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with default_variables(_CLIENT_LIMITS):
                client.set_terminated(self._run)


def _require_time(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"MLflow needs more than {_LIMIT_S:g} s")


def _batches(steps: list[list[Any]]) -> list[list[Any]]:
    """Return the metrics of all steps in batches that MLflow takes. A step is in one batch, unless it is too large. Pure."""
    batches: list[list[Any]] = [[]]
    for metrics in steps:
        if len(batches[-1]) + len(metrics) > _MAX_METRICS:
            batches.append([])
        batches[-1] += metrics
        while len(batches[-1]) > _MAX_METRICS:
            batches.append(batches[-1][_MAX_METRICS:])
            del batches[-2][_MAX_METRICS:]
    return [batch for batch in batches if batch]


def accepted_name(name: str) -> str:
    """Return ``name`` as MLflow accepts it for a metric. Pure.

    If the name changes, it gets a suffix that depends on ``name`` alone: no two names become the same, on any worker.
    """
    accepted = re.sub(r"[^/\w.\- :]", "_", name)[:_MAX_NAME_CHARS] or "_"
    if posixpath.normpath(accepted) != accepted or accepted == "." or accepted.startswith(("..", "/")):  # no plain relative path
        accepted = re.sub(r"^\.+|/", "_", accepted)
    if accepted == name:
        return name
    suffix = "-" + hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:6]
    return accepted[: _MAX_NAME_CHARS - len(suffix)] + suffix
