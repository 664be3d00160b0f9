"""Mlflow: an MLflow tracking server or database, by the package mlflow or mlflow-skinny."""

from __future__ import annotations

import posixpath
import re
import time
from pathlib import Path
from typing import Any

from lockstep.observe.notice import print_notice

_TAG = "lockstep.run"
_MAX_METRICS = 1000
"""How many metrics MLflow takes at a time."""
_MAX_NAME_CHARS = 250


class Mlflow:
    """Sends logged values to MLflow as metrics of one run.

    All steps of an exchange are one transaction of a database or a server. MLflow's old file store writes each metric by itself:
    there a step can be incomplete, if the worker is killed while it writes it. So can a step with more than 1000 values anywhere.
    Characters of a name that MLflow refuses are replaced by "_".

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
        self._run = ""
        self._last = 0
        self._pending: list[list[Any]] = []  # the metrics of each step
        self._names: dict[str, str] = {}  # logged name -> the name in MLflow

    def open(self, run_id: str, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        if self._uri is None:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=self._uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._pending = []
        found = self._client.search_runs([self._experiment_id()], f"tags.`{_TAG}` = '{run_id}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            made = self._client.create_run(self._experiment_id(), tags={_TAG: run_id}, run_name=self._name or run_id)
            self._run = made.info.run_id
        names = self._client.get_run(self._run).data.metrics
        histories = (self._client.get_metric_history(self._run, name) for name in names)
        self._last = max((metric.step for history in histories for metric in history), default=0)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return str(found.experiment_id if found is not None else self._client.create_experiment(self._experiment))

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
        batch: list[Any] = []
        for metrics in self._pending:
            if batch and len(batch) + len(metrics) > _MAX_METRICS:
                self._client.log_batch(self._run, metrics=batch)
                batch = []
            batch += metrics
            while len(batch) > _MAX_METRICS:
                self._client.log_batch(self._run, metrics=batch[:_MAX_METRICS])
                batch = batch[_MAX_METRICS:]
        if batch:
            self._client.log_batch(self._run, metrics=batch)
        self._pending = []

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run)


def accepted_name(name: str) -> str:
    """Return ``name``, with each character that MLflow refuses in the name of a metric replaced by "_". Pure."""
    name = re.sub(r"[^/\w.\- :]", "_", name)[:_MAX_NAME_CHARS] or "_"
    if posixpath.normpath(name) != name or name == "." or name.startswith(("..", "/")):  # it must be a plain relative path
        name = re.sub(r"^\.+|/", "_", name)
    return name
