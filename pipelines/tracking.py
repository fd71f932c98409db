"""Tracking in MLflow, so that recording twice is the same as recording once.

A run is found again by what it is (tags), never by its name or by what a process remembers. Parameters are written
once, metric points are written if they are not there, and a run is closed last: a run that is FINISHED is complete.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from pydantic import JsonValue

from pipelines.home import Home

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAMETER_LENGTH = 500
"""Characters of a parameter in the table, what the strictest servers take; the whole goes into a file beside it."""

BATCH = 1000
"""Metric points in one request, MLflow's limit."""

SETTLED = ("FINISHED",)


class Tracker:
    """One experiment at one tracking URI."""

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self._client = client
        self._experiment = experiment

    @classmethod
    def open(cls, home: Home, uri: str | None, experiment: str) -> Tracker:
        """Connect to `uri`, or to the home folder's own database, made if it is not there."""
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        if uri is None:
            _make_database(home)
        client = MlflowClient(tracking_uri=uri or f"sqlite:///{home.database.resolve()}")
        with home.lock("experiment"):
            found = client.get_experiment_by_name(experiment)
            if found is not None:
                return cls(client, found.experiment_id)
            location = None if uri else home.artifacts.resolve().as_uri()
            return cls(client, client.create_experiment(experiment, artifact_location=location))

    def run(self, identity: Mapping[str, str], name: str, parent: TrackedRun | None = None) -> TrackedRun:
        """The run with these tags, begun if there is none. An unfinished one is taken up again."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        found = self._client.search_runs([self._experiment], filter_string=wanted, max_results=1)
        if found:
            run = TrackedRun(self._client, found[0].info.run_id, found[0].info.status in SETTLED, fresh=False)
            if not run.finished and found[0].info.status != "RUNNING":
                self._client.update_run(run.id, status="RUNNING")
            return run
        tags = {**identity, "mlflow.source.name": "assay", "mlflow.runName": name}
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.id
        created = self._client.create_run(self._experiment, tags=tags, run_name=name)
        return TrackedRun(self._client, created.info.run_id, finished=False, fresh=True)

    def is_finished(self, identity: Mapping[str, str]) -> bool:
        """Whether the run with these tags is there and complete."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        found = self._client.search_runs([self._experiment], filter_string=wanted, max_results=1)
        return bool(found) and found[0].info.status in SETTLED

    def running(self, identity: Mapping[str, str]) -> Iterator[TrackedRun]:
        """All runs with these tags that say they are running."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        for run in self._client.search_runs([self._experiment], f"{wanted} and attributes.status = 'RUNNING'"):
            yield TrackedRun(self._client, run.info.run_id, finished=False, fresh=False)


@dataclass
class TrackedRun:
    """A run in MLflow. finished: it is complete, nothing will be added. fresh: it was begun by this process."""

    _client: MlflowClient
    id: str
    finished: bool
    fresh: bool
    _steps: dict[str, set[int]] = field(default_factory=dict)

    def parameters(self, values: Mapping[str, JsonValue]) -> list[str]:
        """Record parameters, nested ones under dotted names; what is there already stays as it is.

        A value that is too long is shortened, and lies whole in the artifact `parameters/<name>.txt`.
        Returns the names that are new on a run that had parameters before; the tag `assay.added` lists them too.
        """
        from mlflow.entities import Param

        known = {} if self.fresh else self._client.get_run(self.id).data.params
        flat = dict(_flatten(values))
        new = {name: value for name, value in flat.items() if name not in known}
        shown = []
        for name, value in new.items():
            if len(value) > PARAMETER_LENGTH:
                self._client.log_text(self.id, value, f"parameters/{name}.txt")
                note = f"... ({len(value)} characters, whole in parameters/{name}.txt)"
                shown.append(Param(name, value[: PARAMETER_LENGTH - len(note)] + note))
            else:
                shown.append(Param(name, value))
        for start in range(0, len(shown), 100):
            self._client.log_batch(self.id, params=shown[start : start + 100])
        if not known:
            return []
        differ = [name for name in flat if name in known and not _same(known[name], flat[name])]
        for tag, names in (("assay.added", list(new)), ("assay.kept_as_first_recorded", differ)):
            if names:
                self._client.set_tag(self.id, tag, ", ".join(names)[:PARAMETER_LENGTH])
        return list(new)

    def metrics(self, frame: pl.DataFrame) -> None:
        """Record metric points that are not there yet.

        frame: a column `step`, and one column for each metric; null where there is no value at a step. NaN and
        infinity are left out, and the tag `assay.not_finite` counts them by metric.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = []
        left_out: dict[str, list[int]] = {}
        for name in frame.columns:
            if name == "step":
                continue
            there = self._steps_of(name)
            for step, value in frame.select("step", name).drop_nulls().iter_rows():
                if not math.isfinite(value):
                    left_out.setdefault(name, []).append(step)
                elif step not in there:
                    there.add(step)
                    points.append(Metric(name, float(value), now, step))
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self.id, metrics=points[start : start + BATCH])
        if left_out:
            self._count_left_out(left_out)

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._client.set_tag(self.id, name, value)

    def input(self, name: str, digest: str, source: str, context: str) -> None:
        """Record a dataset that the run has read, for lineage."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name=name, digest=digest, source_type="local", source=json.dumps({"uri": source}))
        self._client.log_inputs(self.id, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])

    def file(self, path: Path) -> None:
        """Keep a copy of a file as an artifact, in place of one of the same name."""
        self._client.log_artifact(self.id, str(path))

    def text(self, name: str, text: str) -> None:
        """Keep a text as an artifact, in place of one of the same name."""
        self._client.log_text(self.id, text, name)

    def finish(self, status: str = "FINISHED") -> None:
        """Close the run. Nothing may be added to a FINISHED one; FAILED and KILLED ones are taken up again."""
        if not self.finished:
            self._client.set_terminated(self.id, status)
            self.finished = status in SETTLED

    def _steps_of(self, name: str) -> set[int]:
        if name not in self._steps:
            history = [] if self.fresh else self._client.get_metric_history(self.id, name)
            self._steps[name] = {point.step for point in history}
        return self._steps[name]

    def _count_left_out(self, steps: dict[str, list[int]]) -> None:
        """Counts, with the last step counted, so that a step seen again is not counted again."""
        said = self._client.get_run(self.id).data.tags.get("assay.not_finite", "{}")
        counts: dict[str, dict[str, int]] = json.loads(said)
        for name, at in steps.items():
            before = counts.get(name, {"count": 0, "last_step": -1})
            fresh = {step for step in at if step > before["last_step"]}
            counts[name] = {"count": before["count"] + len(fresh), "last_step": max([before["last_step"], *fresh])}
        self._client.set_tag(self.id, "assay.not_finite", json.dumps(counts))


def _flatten(values: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = prefix + re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _same(recorded: str, value: str) -> bool:
    """Whether a recorded parameter, perhaps shortened, is this value."""
    head = recorded.split("... (")[0]
    return recorded == value or (
        len(value) > PARAMETER_LENGTH and value.startswith(head) and f"({len(value)} " in recorded
    )


def _make_database(home: Home) -> None:
    """Make MLflow's database whole or not at all: several processes may ask, and any of them may be killed.

    With write-ahead logging readers do not stop writers; the setting stays with the file.
    """
    if home.database.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with home.lock("database"):
        if home.database.exists():
            return
        unfinished = home.path.resolve() / "tracking.db.unfinished"
        for leftover in home.path.glob("tracking.db.unfinished*"):
            leftover.unlink()
        home.artifacts.mkdir(parents=True, exist_ok=True)
        store = SqlAlchemyStore(  # type: ignore[no-untyped-call]
            f"sqlite:///{unfinished}", home.artifacts.resolve().as_uri()
        )
        store.engine.dispose()
        with sqlite3.connect(unfinished) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
        unfinished.rename(home.database)
