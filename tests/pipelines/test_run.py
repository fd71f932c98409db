"""A study as users run it: real processes, killed at several points, run twice, run on scrambled rewards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars as pl
import pytest

from pipelines.cli import _main
from pipelines.home import Home
from pipelines.study import load_study
from pipelines.work import Work

WriteStudy = Callable[..., Path]
Capture = pytest.CaptureFixture[str]

ASSAY = [sys.executable, "-c", "from pipelines.cli import main; main()"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "MLFLOW", "ASSAY"))}


def run(study: Path, home: Path) -> dict[str, Any]:
    """What `assay run` says the study came to."""
    command = [*ASSAY, "run", str(study), "--home", str(home), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert Path(said.pop("report")).exists()
    return said


def kill_when(condition: Callable[[Path], bool], study: Path, home: Path) -> bool:
    """Start `assay run`, and kill it with SIGKILL as soon as the condition holds. Whether it came to that."""
    with subprocess.Popen(
        [*ASSAY, "run", str(study), "--home", str(home)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if condition(home):
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait() == -signal.SIGKILL
            time.sleep(0.002)
        assert process.returncode == 0
    return False


def stamps(home: Path) -> dict[str, tuple[int, int]]:
    """Identity and time of the last change of every file of finished datasets, label sets and runs."""
    store = home / "store"
    return {
        str(p.relative_to(store)): (p.stat().st_ino, p.stat().st_mtime_ns)
        for kind in ("datasets", "labels", "runs")
        for p in (store / kind).rglob("*")
        if p.is_file()
    }


def content(home: Path) -> dict[str, bytes]:
    """Everything that must be the same each time: all of the store but manifests, which hold times."""
    store = home / "store"
    return {
        str(p.relative_to(store)): p.read_bytes()
        for kind in ("datasets", "labels", "runs")
        for p in sorted((store / kind).rglob("*"))
        if p.is_file() and p.name != "manifest.json"
    }


def recorded(home: Path) -> list[tuple[str, str, list[tuple[str, int, float]]]]:
    """Every run in the tracking database: name, status, metric points."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'tracking.db'}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    found = []
    for tracked in client.search_runs(experiments, max_results=1000):
        points = [
            (name, p.step, p.value)
            for name in tracked.data.metrics
            for p in client.get_metric_history(tracked.info.run_id, name)
        ]
        found.append((tracked.info.run_name, tracked.info.status, sorted(points)))
    return sorted(found)


Finished = tuple[Path, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy) -> Finished:
    """Study file, home folder and result of a study that ran undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    study = write_study(folder / "study")
    return study, folder / "home", run(study, folder / "home")


def test_a_study_ends_with_every_label_set_and_run(finished: Finished) -> None:
    _, home, said = finished
    assert said["complete"]
    assert [row["labeler"] for row in said["scores"]] == ["source", "zero", "transport"]
    assert all(row["n"] == 2 and np.isfinite(row["mean"]) for row in said["scores"])
    agreement = {row["labeler"]: row["agreement"]["pearson_steps"] for row in said["labels"]}
    assert agreement["source"] == pytest.approx(1)
    assert agreement["zero"] is None
    assert -1 < agreement["transport"] < 1
    runs = recorded(home)
    expected = [f"replay {labeler} iql seed {seed}" for labeler in ("source", "transport", "zero") for seed in (0, 1)]
    assert [name for name, _, _ in runs] == [*expected, "tiny"]
    assert {status for _, status, _ in runs} == {"FINISHED"}
    for name, _, points in runs:
        if name != "tiny":
            assert {step for _, step, _ in points} == {50, 100, 150, 200, 250, 300}


def test_asked_again_it_prints_the_result_and_changes_nothing(finished: Finished) -> None:
    study, home, said = finished
    everything = {p: p.stat().st_mtime_ns for p in home.rglob("*") if p.is_file()}
    program = (
        "import sys; from pipelines.cli import _main; code = _main(sys.argv[1:]); "
        "assert 'prefect' not in sys.modules and 'mlflow' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(study), "--home", str(home), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    again.pop("report")
    assert again == said
    assert {p: p.stat().st_mtime_ns for p in home.rglob("*") if p.is_file()} == everything


def test_the_report_needs_nothing_from_outside(finished: Finished) -> None:
    page = (finished[1] / "reports" / "tiny.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)|https?://|url\((?!["']?#|["']?data:)""", page)
    assert page.count("<svg") == page.count("</svg>") >= 4
    for words in ("source", "zero", "transport", "Scores: iql on replay", "converged 12/12"):
        assert words in page


def test_label_quality_is_told_before_training(finished: Finished, tmp_path: Path, capsys: Capture) -> None:
    study, home, said = finished
    assert _main(["labels", "quality", str(study), "--home", str(home), "--json", "--plots", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["datasets"]["replay"]
    assert found.keys() == {"zero", "transport"}
    agreement = next(row["agreement"] for row in said["labels"] if row["labeler"] == "transport")
    assert found["transport"]["steps"]["pearson"] == agreement["pearson_steps"]
    assert found["transport"]["returns"]["spearman"] == agreement["spearman_returns"]
    assert "<svg" in (tmp_path / "replay.transport.svg").read_text(encoding="utf-8")
    assert _main(["labels", "quality", str(study), "--home", str(home), "--against", "zero"]) == 0
    assert "replay: label sets against zero" in capsys.readouterr().out
    assert _main(["labels", "quality", str(study), "--home", str(home), "--labeler", "zeros"]) == 2
    assert "There is: zero, transport" in capsys.readouterr().err


def test_labels_leave_as_a_table_and_come_back(finished: Finished, tmp_path: Path, capsys: Capture) -> None:
    study, home, _ = finished
    command = ["labels", "export", str(study), "transport", str(tmp_path / "mine.parquet"), "--home", str(home)]
    assert _main(command) == 0
    assert _main(command) == 2
    assert "it exists already" in capsys.readouterr().err
    work = Work(load_study(study), Home(home))
    trajectories = work.dataset("replay").trajectories()
    table = pl.read_parquet(tmp_path / "mine.parquet")
    assert table["reward"].to_numpy().tobytes() == np.asarray(work.labels("replay", "transport").rewards).tobytes()
    assert table["episode"].to_list() == trajectories.episode_index.tolist()


def test_from_an_empty_store_everything_is_the_same_to_the_bit(finished: Finished, tmp_path: Path) -> None:
    study, home, said = finished
    again = run(study, tmp_path / "home")
    assert again == said
    assert content(tmp_path / "home") == content(home)
    assert recorded(tmp_path / "home") == recorded(home)


def has_any(pattern: str, at_least: int = 1) -> Callable[[Path], bool]:
    return lambda home: len(list(home.glob(pattern))) >= at_least


KILLS: dict[str, Callable[[Path], bool]] = {
    "while reading": has_any("store/partial/*"),
    "after the first file": has_any("store/ingests/*.json"),
    "while labelling": has_any("store/labels/*/*", at_least=3),
    "in training": has_any("checkpoints/*.safetensors"),
    "between runs": has_any("store/runs/*", at_least=2),
    "before it is recorded": has_any("reports/*.html"),
}


def test_killed_at_any_point_the_same_command_ends_the_same(
    finished: Finished, write_study: WriteStudy, tmp_path: Path
) -> None:
    _, undisturbed, said = finished
    study, home = write_study(tmp_path / "study"), tmp_path / "home"
    came_to_it = {}
    before: dict[str, tuple[int, int]] = {}
    for point, condition in KILLS.items():
        came_to_it[point] = kill_when(condition, study, home)
        now = stamps(home)
        assert {name: now.get(name) for name in before} == before, f"something finished was made again, {point}"
        before = now
    assert sum(came_to_it.values()) >= 5, came_to_it  # the last one may be too quick to hit
    assert run(study, home) == said
    now = stamps(home)
    assert {name: now[name] for name in before} == before
    assert content(home) == content(undisturbed)
    assert recorded(home) == recorded(undisturbed)
    assert not list((home / "checkpoints").iterdir())


def test_scrambled_rewards_change_no_labels_but_source(
    finished: Finished, write_study: WriteStudy, tmp_path: Path
) -> None:
    _, undisturbed, said = finished
    study = write_study(tmp_path / "study")
    with h5py.File(tmp_path / "study" / "replay.hdf5", "r+") as file:
        file["rewards"][...] = np.random.default_rng(5).permutation(file["rewards"][...])
    command = [*ASSAY, "label", str(study), "--home", str(tmp_path / "home"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    ids = {row["labeler"]: row["label_id"] for row in json.loads(done.stdout)}
    expected = {row["labeler"]: row["label_id"] for row in said["labels"]}
    assert {name for name in expected if ids[name] != expected[name]} == {"source"}
    work = [Work(load_study(s), Home(h)) for s, h in ((study, tmp_path / "home"), (finished[0], undisturbed))]
    for labeler in ("zero", "transport"):
        scrambled, plain = (np.asarray(w.labels("replay", labeler).rewards) for w in work)
        assert scrambled.tobytes() == plain.tobytes()


def test_two_at_once_share_the_work(finished: Finished, write_study: WriteStudy, tmp_path: Path) -> None:
    _, undisturbed, said = finished
    study, home = write_study(tmp_path / "study"), tmp_path / "home"
    command = [*ASSAY, "run", str(study), "--home", str(home), "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)]
    results = [json.loads(process.communicate(timeout=240)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    for result in results:
        result.pop("report")
        assert result == said
    assert recorded(home) == recorded(undisturbed)
