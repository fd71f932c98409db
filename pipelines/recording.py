"""What a study leaves in MLflow: a parent run for the study, a child run for each of its runs.

Recording again adds nothing that is there and completes what a kill cut short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import polars as pl

from data.digests import digest_of
from pipelines.comparison import Comparison
from pipelines.home import write_whole
from pipelines.tracking import TrackedRun, Tracker
from pipelines.work import RETURN, SCORE, Cell, Work


class Record:
    """The record of one study at one tracking URI."""

    def __init__(self, work: Work) -> None:
        self._work = work

    @property
    def uri(self) -> str | None:
        """Where runs go; None for the home folder's own database."""
        return self._work.study.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")

    @property
    def experiment(self) -> str:
        """Name of the experiment."""
        named = self._work.study.tracking.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        return named or self._work.study.study

    @cached_property
    def _tracker(self) -> Tracker:
        return Tracker.open(self._work.home, self.uri, self.experiment)

    @cached_property
    def parent(self) -> TrackedRun:
        """The run of the study, begun if it is not there."""
        run = self._tracker.run({"assay.study": self._work.id, "assay.kind": "study"}, self._work.study.study)
        if not run.finished:
            said = self._work.study.model_dump(mode="json", exclude={"study", "tracking"})
            for group in ("datasets", "demonstrations"):
                for entry in said[group].values():
                    entry["path"] = os.path.basename(entry["path"])  # noqa: PTH119
            run.parameters(said)
        return run

    def child(self, cell: Cell) -> TrackedRun:
        """The run of a cell, with what it is; begun if it is not there."""
        identity = {"assay.study": self._work.id, "assay.kind": "run", "assay.run_id": cell.run_id}
        run = self._tracker.run(identity, cell.name, self.parent)
        if not run.finished:
            work = self._work
            dataset = work.dataset(cell.dataset)
            run.parameters(
                {
                    "dataset": cell.dataset,
                    "dataset_digest": dataset.digest,
                    "labeler": cell.labeler,
                    "label_id": cell.label_id,
                    "actions": work.actions_id(cell.dataset) or "of the file",
                    "algorithm": cell.algorithm,
                    "seed": cell.seed,
                    "labeler_settings": work.study.labeler(cell.labeler).model_dump(mode="json"),
                    "algorithm_settings": work.study.algorithms[cell.algorithm].model_dump(mode="json"),
                    "training": work.study.training.model_dump(mode="json"),
                    "evaluation": work.study.evaluation.model_dump(mode="json"),
                    "environment": work.study.datasets[cell.dataset].environment,
                }
            )
            run.input(cell.dataset, dataset.digest, str(dataset.path), "training")
            run.input(
                f"{cell.dataset}.{cell.labeler}",
                cell.label_id,
                str(work.labels(cell.dataset, cell.labeler).path),
                "labels",
            )
        return run

    def progress(self, cells: Sequence[Cell], frames: Sequence[pl.DataFrame]) -> None:
        """Record the metrics so far of runs that are still training."""
        for cell, frame in zip(cells, frames, strict=True):
            self.child(cell).metrics(frame)

    def complete(self, cell: Cell) -> None:
        """Record all of a finished run from the store, and close it."""
        run = self.child(cell)
        if run.finished:
            return
        run.metrics(self._work.metrics(cell))
        evaluations = self._work.evaluations(cell)
        if evaluations is not None:
            by_step = evaluations.group_by("step").agg(pl.col("return").mean(), pl.col("score").mean()).sort("step")
            run.metrics(by_step.select("step", pl.col("return").alias(RETURN)))
            if by_step["score"].null_count() == 0:
                run.metrics(by_step.select("step", pl.col("score").alias(SCORE)))
            run.text("evaluations.csv", evaluations.write_csv())
        for name in ("policy.safetensors", "manifest.json"):
            run.file(self._work.store.run(cell.run_id) / name)
        run.finish()

    def close(self, comparison: Comparison) -> None:
        """Record the comparison, and close the study if it is complete."""
        if self.parent.finished:
            return
        self.parent.text("comparison.json", comparison.model_dump_json(indent=1))
        self.parent.text("comparison.csv", comparison.frame().write_csv())
        self.parent.file(self._work.home.report(comparison.study))
        if comparison.complete:
            self.parent.finish()

    def stop(self, status: str) -> None:
        """Leave no run that claims to be running: mark those of this study FAILED or KILLED until they are taken up."""
        if "_tracker" not in self.__dict__:
            return
        for run in self._tracker.running({"assay.study": self._work.id}):
            run.finish(status)

    # ------------------------------------------------------------ the mark of a finished study

    def mark_done(self) -> None:
        """Say, last of all, that study and record are complete."""
        write_whole(self._mark, json.dumps({"study": self._work.study.study, "tracking": self.uri or "home"}) + "\n")

    @property
    def is_done(self) -> bool:
        """Whether a finished study was recorded here; nothing is opened to find out."""
        return self._mark.exists() and (self.uri is not None or self._work.home.database.exists())

    @property
    def _mark(self) -> Path:
        place = digest_of({"uri": self.uri, "experiment": self.experiment})
        return self._work.home.studies / self._work.id / f"recorded-{place}.json"
