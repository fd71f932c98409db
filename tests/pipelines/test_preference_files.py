"""A study that names a file of preferences: where it is found, what it is known by, and what is kept of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.cli import _main
from pipelines.home import Home
from pipelines.study import load_study
from pipelines.work import Work

WriteStudy = Callable[..., Path]

LABELERS = {
    "human": {
        "kind": "preference",
        "preferences": {"kind": "file", "path": "pairs.json"},
        "members": 2,
        "hidden": [8],
        "steps": 20,
    }
}
PAIRS = {"encoding": "sign", "length": 3, "starts": [[[0, 0], [1, 1]], [[2, 0], [3, 1]], [[0, 0], [99, 0]]]}


@pytest.fixture
def study(write_study: WriteStudy, tmp_path: Path) -> Path:
    path = write_study(tmp_path / "study", labelers=LABELERS)
    say(path, PAIRS | {"labels": [1, -1, 0]})
    return path


def say(study: Path, pairs: dict[str, object]) -> None:
    (study.parent / "pairs.json").write_text(json.dumps(pairs))


def work(study: Path, home: Home) -> Work:
    return Work(load_study(study), home)


@pytest.mark.filterwarnings("ignore:.*nothing was learned")
def test_the_file_lies_beside_the_study_and_what_was_left_out_is_kept_with_the_labels(study: Path, home: Home) -> None:
    done = work(study, home)
    done.ingest("replay")
    labels = done.label("replay", "human")
    assert np.isfinite(labels.rewards).all()
    origin = done.store.labels(labels.manifest.dataset, done.label_ids("replay", "human").raw).manifest.origin
    said = "pair 2 is not used: its second segment, from episode 99, step 0, is not in the dataset."
    notes, report = origin["notes"], origin["report"]
    assert isinstance(notes, list) and f"preference: {said}" in notes
    assert isinstance(report, dict) and report["pairs"] == 2
    assert isinstance(findings := report["findings"], list)
    assert [finding["message"] for finding in findings if isinstance(finding, dict)] == [said]


def test_a_study_is_known_by_what_its_preferences_say_and_not_by_where_they_lie(
    study: Path, home: Home, tmp_path: Path
) -> None:
    before = work(study, home).id
    shutil.copytree(study.parent, tmp_path / "moved")
    assert work(tmp_path / "moved" / study.name, home).id == before
    say(study, PAIRS | {"labels": [-1, -1, 0]})
    assert work(study, home).id != before


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (None, "pairs.json: there is no such file"),
        ({"length": 3, "starts": [[0, 5], [1, 6]], "labels": [1, 0]}, "pairs.json: it does not state its encoding"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_study_before_any_work(
    pairs: dict[str, object] | None, said: str, study: Path, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    if pairs is None:
        (study.parent / "pairs.json").unlink()
    else:
        say(study, pairs)
    assert _main(["run", str(study), "--home", str(home.path)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (home.path / "store" / "datasets").exists()
