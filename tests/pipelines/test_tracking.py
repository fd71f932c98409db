from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from pipelines.home import Home
from pipelines.tracking import TrackedRun, Tracker

A = {"assay.study": "s", "assay.run_id": "a"}
B = {"assay.study": "s", "assay.run_id": "b"}
ARCHITECTURE = ",".join(f"layer{i}=256" for i in range(600))
NOTE = "é" * 3000


def history(run: TrackedRun, name: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in run._client.get_metric_history(run.id, name))


def test_two_runs_of_one_name_are_told_apart_by_what_they_are(home: Home) -> None:
    tracker = Tracker.open(home, None, "study")
    first, second = tracker.run(A, "otr-iql"), tracker.run(B, "otr-iql")
    assert first.id != second.id
    assert tracker.run(A, "otr-iql").id == first.id
    assert Tracker.open(home, None, "study").run(B, "another name").id == second.id


def test_every_parameter_is_kept_whole(home: Home, tmp_path: Path) -> None:
    run = Tracker.open(home, None, "study").run(A, "a")
    run.parameters({"architecture": ARCHITECTURE, "note": NOTE, "none": None, "empty": "", "nested": {"lr": 3e-4}})
    params = run._client.get_run(run.id).data.params
    assert params["none"] == "null"
    assert params["nested.lr"] == "0.0003"
    assert params["empty"] == ""
    for name, whole in (("architecture", ARCHITECTURE), ("note", NOTE)):
        assert len(params[name]) <= 500
        assert f"({len(whole)} characters" in params[name]
        file = run._client.download_artifacts(run.id, f"parameters/{name}.txt", str(tmp_path))
        assert Path(file).read_text(encoding="utf-8") == whole


def test_finite_values_come_back_exactly_and_others_are_left_out_with_a_count(home: Home) -> None:
    run = Tracker.open(home, None, "study").run(A, "a")
    loss = [1.5, math.nan, math.inf, -math.inf, 0.25, 1e308, 5e-324]
    frame = pl.DataFrame(
        {"step": range(7), "loss": loss, "return": [3.0, None, None, None, 12345678901234.0, 0.0, None]}
    )
    run.metrics(frame)
    assert history(run, "loss") == [(0, 1.5), (4, 0.25), (5, 1e308), (6, 5e-324)]
    assert history(run, "return") == [(0, 3.0), (4, 12345678901234.0), (5, 0.0)]
    assert json.loads(run._client.get_run(run.id).data.tags["assay.not_finite"])["loss"]["count"] == 3


def test_a_resumed_run_keeps_points_and_parameters_once_and_says_what_is_new(home: Home) -> None:
    tracker = Tracker.open(home, None, "study")
    run = tracker.run(A, "a")
    assert run.parameters({"seed": 0, "architecture": ARCHITECTURE}) == []
    run.metrics(pl.DataFrame({"step": [1, 4], "loss": [math.nan, 0.25]}))

    resumed = Tracker.open(home, None, "study").run(A, "a")
    assert resumed.parameters({"seed": 0, "lr": 1e-4, "architecture": ARCHITECTURE}) == ["lr"]
    resumed.metrics(pl.DataFrame({"step": [1, 4, 5], "loss": [math.nan, 0.25, 0.125]}))
    assert history(resumed, "loss") == [(4, 0.25), (5, 0.125)]
    tags = resumed._client.get_run(resumed.id).data.tags
    assert tags["assay.added"] == "lr"
    assert json.loads(tags["assay.not_finite"])["loss"]["count"] == 1
    assert "assay.kept_as_first_recorded" not in tags


def test_a_parameter_that_changed_does_not_stop_the_run(home: Home) -> None:
    tracker = Tracker.open(home, None, "study")
    tracker.run(A, "a").parameters({"seed": 0, "note": NOTE})
    run = tracker.run(A, "a")
    run.parameters({"seed": 1, "note": NOTE + "é"})
    recorded = run._client.get_run(run.id).data
    assert recorded.params["seed"] == "0"
    assert recorded.tags["assay.kept_as_first_recorded"] == "seed, note"


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_an_unfinished_run_is_taken_up_again_and_finished_last(home: Home, status: str) -> None:
    tracker = Tracker.open(home, None, "study")
    parent = tracker.run({"assay.study": "s"}, "study")
    run = tracker.run(A, "a", parent)
    run.finish(status)
    again = tracker.run(A, "a", parent)
    assert again.id == run.id
    assert not again.finished
    assert again._client.get_run(again.id).info.status == "RUNNING"
    again.finish()
    assert tracker.run(A, "a", parent).finished
    assert tracker.is_finished(A)
    assert again._client.get_run(again.id).data.tags["mlflow.parentRunId"] == parent.id


def test_an_input_recorded_twice_is_there_once(home: Home) -> None:
    run = Tracker.open(home, None, "study").run(A, "a")
    for _ in range(2):
        run.input("hopper", "0" * 32, "/data/hopper.hdf5", "training")
    inputs = run._client.get_run(run.id).inputs.dataset_inputs
    assert [(i.dataset.name, i.dataset.digest) for i in inputs] == [("hopper", "0" * 32)]


def test_processes_that_start_at_once_share_one_whole_database(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipelines.home import Home, quieten; quieten()\n"
        "from pipelines.tracking import Tracker; import polars as pl\n"
        "run = Tracker.open(Home(Path(sys.argv[1])), None, 'study').run({'assay.run_id': sys.argv[2]}, 'n')\n"
        "run.metrics(pl.DataFrame({'step': range(2000), 'loss': [0.5] * 2000})); run.finish()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(i)]) for i in range(3)]
    assert [p.wait(120) for p in processes] == [0, 0, 0]
    with sqlite3.connect(tmp_path / "tracking.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT COUNT(*) FROM metrics").fetchone() == (6000,)
        assert connection.execute("SELECT COUNT(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (3,)
    connection.close()
    assert not list(tmp_path.glob("tracking.db.unfinished*"))
