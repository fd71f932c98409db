"""A study whose policies are trained on labelled actions instead of those of the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest

from data.errors import ConfigurationError
from pipelines.comparison import compare
from pipelines.home import Home
from pipelines.study import load_study
from pipelines.tables import comparison_table
from pipelines.work import Cell, Work

WriteStudy = Callable[..., Path]

IDM = {"kind": "inverse_dynamics", "actions": {"fraction": 0.5}, "members": 2, "hidden": [8], "steps": 20}
LABELERS = {"source": {"kind": "source"}, "zero": {"kind": "zero"}, "idm": IDM}
CHANGES = {
    "datasets": {"replay": {"path": "replay.hdf5", "actions": "idm"}},
    "demonstrations": None,
    "labelers": LABELERS,
    "seeds": [0],
    "training": {"steps": 20, "batch_size": 8},
}

pytestmark = pytest.mark.filterwarnings("ignore:inverse_dynamics")  # actions here are noise


class NoRecord:
    """A record that keeps nothing."""

    def progress(self, cells: Sequence[Cell], frames: Sequence[pl.DataFrame]) -> None: ...


def done(study: Path, home: Path) -> Work:
    """All of a study but its record."""
    work = Work(load_study(study), Home(home))
    work.ingest("replay")
    for labeler in work.study.labeling_order():
        work.label("replay", labeler)
    work.train("replay", "iql", NoRecord())  # type: ignore[arg-type]
    return work


def test_policies_learn_from_the_labelled_actions(write_study: WriteStudy, tmp_path: Path) -> None:
    work = done(write_study(tmp_path / "study", **CHANGES), tmp_path / "home")
    labels = np.asarray(work.labels("replay", "idm").actions)
    assert np.asarray(work.trajectories("replay").actions).tobytes() == labels.tobytes()
    own = np.asarray(work.dataset("replay").trajectories().actions)
    assert (labels != own).any()
    comparison = compare(work)
    assert [row.labeler for row in comparison.labels] == ["source", "zero"]
    assert comparison.complete and [row.n for row in comparison.scores] == [1, 1]
    (row,) = comparison.actions
    assert row.used and row.measure == "R2" and row.agreement is not None
    assert "actions by idm (trained on): R2" in str(comparison_table(comparison, "replay").caption)
    again = Work(load_study(tmp_path / "study" / "tiny.yaml"), Home(tmp_path / "home"))
    assert again.is_trained()

    datasets = {"datasets": {"replay": {"path": "replay.hdf5"}}}
    without = done(write_study(tmp_path / "study", **(CHANGES | datasets)), tmp_path / "home")
    assert without.label_ids("replay", "idm") == work.label_ids("replay", "idm")
    assert {c.run_id for c in without.all_cells()}.isdisjoint(c.run_id for c in work.all_cells())


def test_actions_that_are_not_shown_change_no_label(write_study: WriteStudy, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", **CHANGES)
    work = done(study, tmp_path / "home")
    shown = ~np.isnan(work.evidence("replay", "idm").actions).any(1)
    with h5py.File(tmp_path / "study" / "replay.hdf5", "r+") as file:
        actions = file["actions"][...]
        actions[~shown] = np.random.default_rng(3).permutation(actions[~shown])
        file["actions"][...] = actions
    other = done(study, tmp_path / "other")
    assert other.dataset("replay").digest != work.dataset("replay").digest
    labels, others = (np.asarray(w.labels("replay", "idm").actions) for w in (work, other))
    assert others.tobytes() == labels.tobytes()
    metrics, other_metrics = ([w.metrics(cell) for cell in w.all_cells()] for w in (work, other))
    assert all(a.equals(b) for a, b in zip(metrics, other_metrics, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"datasets": {"replay": {"path": "replay.hdf5", "actions": "zero"}}}, "no labeler of actions 'zero'"),
        ({"labelers": {"idm": IDM}}, "no labeler gives rewards"),
        ({"labelers": {**LABELERS, "idm": {**IDM, "transforms": [{"kind": "return_range"}]}}}, "labels actions"),
    ],
)
def test_a_study_that_mixes_up_actions_and_rewards_is_refused(
    write_study: WriteStudy, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    study = write_study(tmp_path / "study", **(CHANGES | changes))
    with pytest.raises(ConfigurationError, match=said):
        load_study(study)
