"""LeRobot datasets: columns, pictures, ends, and rows that are not what the description says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.errors import DatasetError
from data.readers.lerobot import LeRobot
from data.readers.reader import RefusedError
from tests.data.readers.reading import read_path
from tests.data.readers.samples import LENGTHS, Recording, lists, recording, write_lerobot_v2, write_lerobot_v3

Change = Callable[[pa.Table], pa.Table]


@pytest.fixture(params=[write_lerobot_v2, write_lerobot_v3], ids=["v2", "v3"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write: Callable[[Path, Recording], Path] = request.param
    return write(tmp_path, recording())


def describe(path: Path, **features: tuple[str, list[int]] | None) -> None:
    """Add features to the description, or take them out; `__` in names is a dot."""
    file = path / "meta" / "info.json"
    info = json.loads(file.read_text())
    for key, feature in features.items():
        name = key.replace("__", ".")
        if feature is None:
            del info["features"][name]
        else:
            info["features"][name] = {"dtype": feature[0], "shape": feature[1], "names": None}
    file.write_text(json.dumps(info))


def rewrite(path: Path, change: Change) -> None:
    """Change the rows of every data file."""
    for file in sorted((path / "data").rglob("*.parquet")):
        pq.write_table(change(pq.read_table(file)), file)


def with_column(key: str, values: Callable[[int], object]) -> Change:
    """Add a column of as many values as there are rows."""
    return lambda table: table.append_column(key, values(len(table)))


def replaced(table: pa.Table, key: str, values: object) -> pa.Table:
    return table.set_column(table.column_names.index(key), key, values)


@pytest.mark.parametrize("rows", [1, 3])
def test_how_many_rows_are_unpacked_at_a_time_changes_nothing(path, monkeypatch, rows):
    whole = read_path(LeRobot(), path)
    monkeypatch.setattr("data.readers.lerobot.ROWS", rows)
    pieces = read_path(LeRobot(), path)
    assert pieces.trajectories.digest() == whole.trajectories.digest() and pieces.findings == whole.findings


def test_tasks_are_counted_by_episode(path):
    with LeRobot().open(path) as source:
        assert source.metadata["tasks"] == {"walk": len(LENGTHS)} and source.metadata["fps"] == 50


# ---------------------------------------------------------------- ends


def test_an_end_is_what_the_setting_says_it_is(path):
    assert read_path(LeRobot(), path).trajectories.truncated.all()
    got = read_path(LeRobot(ends="terminated"), path)
    assert got.trajectories.terminated.all() and len(got.trajectories.transition_index) == sum(LENGTHS)
    assert "next.done" in got.finding("ends-taken").message
    assert "final-observation-unknown" not in got.codes and "final-observation-not-needed" in got.codes


def test_success_marks_an_end_too(path):
    rewrite(path, lambda table: table.drop_columns("next.done"))
    rewrite(path, lambda table: table.append_column("next.success", pa.array(np.asarray(table["index"]) == 3)))
    describe(path, next__done=None, next__success=("bool", [1]))
    got = read_path(LeRobot(ends="terminated"), path)
    assert np.flatnonzero(got.trajectories.terminated).tolist() == [0]  # step 3 is the last of the first episode
    assert got.finding("unfinished-episodes").count == len(LENGTHS) - 1


def test_without_marks_the_setting_speaks_of_every_end(path):
    describe(path, next__done=None)
    got = read_path(LeRobot(ends="terminated"), path)
    assert got.trajectories.terminated.all() and "nothing marks" in got.finding("ends-taken").message


# ---------------------------------------------------------------- columns


def test_observations_are_chosen_and_joined(path):
    rewrite(path, with_column("observation.environment", lambda n: lists(np.full((n, 2), 0.5))))
    describe(path, observation__environment=("float64", [2]))
    got = read_path(LeRobot(), path)
    assert got.trajectories.observations.shape[1:] == (5,) and (got.trajectories.observations[:, :2] == 0.5).all()
    assert {key: space.dtype for key, space in got.source.observation.items()} == {
        "observation.environment": "float64",
        "observation.state": "float32",
    }
    alone = read_path(LeRobot(observation_keys=("observation.state",)), path)
    np.testing.assert_array_equal(alone.trajectories.observations, got.trajectories.observations[:, 2:])
    assert "Not read: observation.environment" in alone.finding("observation-keys").message


@pytest.mark.parametrize("dtype", ["video", "image"])
def test_pictures_are_refused_or_left_out_on_request(path, dtype):
    plain = read_path(LeRobot(), path)
    describe(path, observation__images__top=(dtype, [48, 64, 3]))
    with pytest.raises(RefusedError, match=rf"^recording: .*observation\.images\.top \({dtype}\).*videos: leave_out"):
        LeRobot().open(path)
    with pytest.raises(RefusedError, match=f"'observation.images.top' is {dtype}"):
        LeRobot(observation_keys=("observation.images.top",)).open(path)
    for reader in (LeRobot(videos="leave_out"), LeRobot(observation_keys=("observation.state",))):
        assert read_path(reader, path).trajectories.digest() == plain.trajectories.digest()
    left_out = read_path(LeRobot(videos="leave_out"), path).finding("pictures-left-out")
    assert left_out.severity == "warning" and left_out.count == 1


def test_rewards_are_optional(path):
    describe(path, next__reward=None)
    assert read_path(LeRobot(), path).rewards is None


def test_integer_actions_are_discrete(path):
    rewrite(path, lambda table: replaced(table, "action", pa.array(np.arange(len(table)) % 4)))
    describe(path, action=("int64", [1]))
    got = read_path(LeRobot(n_actions=6), path)
    assert got.trajectories.n_actions == (6,) and got.trajectories.actions.shape == (sum(LENGTHS),)
    assert read_path(LeRobot(), path).trajectories.n_actions == (4,)


def test_matrices_in_nested_lists_keep_their_shape(path):
    rewrite(path, with_column("observation.grid", lambda n: pa.array([[[t, 1], [2, 3], [4, 5]] for t in range(n)])))
    describe(path, observation__grid=("int64", [3, 2]))
    got = read_path(LeRobot(observation_keys=("observation.grid",)), path)
    assert got.trajectories.observations.shape[1:] == (3, 2)
    assert got.trajectories.observations[0].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("missing", "message"), [("observation__state", "no feature 'observation'"), ("action", "no feature 'action'")]
)
def test_a_feature_that_is_needed_is_named_with_those_there_are(path, missing, message):
    describe(path, **{missing: None})
    with pytest.raises(RefusedError, match=rf"{message}.*features present: .*next\.done"):
        LeRobot().open(path)


# ---------------------------------------------------------------- rows that cannot be right


def last_file(path: Path) -> Path:
    return sorted((path / "data").rglob("*.parquet"))[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(0, len(table) - 1), r"episode 11 of 5 steps comes here|of 5 steps, and 4 rows"),
        (lambda table: table.drop_columns("action"), "column 'action' is missing; columns present: observation.state"),
        (
            lambda table: replaced(table, "frame_index", pa.array(np.arange(len(table))[::-1].copy())),
            "'frame_index' is .* at step 0: the rows are out of order",
        ),
        (
            lambda table: replaced(table, "episode_index", pa.array(np.full(len(table), 77))),
            "comes here, and there is episode 77",
        ),
        (
            lambda table: pa.concat_tables(
                [table, replaced(table, "episode_index", pa.array(np.full(len(table), 12)))]
            ),
            "holds episode 12",
        ),
        (
            lambda table: replaced(table, "action", pa.array([[0.0]] * len(table))),
            r"'action' has 1 numbers a row; expected 2",
        ),
        (
            lambda table: replaced(table, "action", pa.array([*[[0.0, 1.0]] * (len(table) - 1), None])),
            "'action' has no value at row",
        ),
        (
            lambda table: replaced(table, "observation.state", pa.array(["a"] * len(table))),
            "'observation.state' holds string: expected numbers",
        ),
    ],
)
def test_rows_that_are_not_what_the_description_says_are_refused_by_file(path, change, message):
    file = last_file(path)
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(DatasetError, match=message) as caught:
        read_path(LeRobot(), path)
    assert file.name in str(caught.value)


def test_a_missing_data_file_is_named(path):
    file = last_file(path)
    file.unlink()
    with pytest.raises(DatasetError, match=rf"{file.name}: there is no such file"):
        read_path(LeRobot(), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v1.6"}, "says version v1.6; versions 2.0, 2.1 and 3.0 can be read"),
        ({"total_episodes": 13}, "says 13 episodes and 'meta/episodes' lists 12"),
        ({"total_episodes": "many"}, r"meta/info\.json: 'total_episodes': input should be a valid integer"),
        ({"data_path": "../elsewhere/{episode_index}{file_index}.parquet"}, "data_path leads out of the dataset"),
        ({"data_path": "data/{name}.parquet"}, "data_path 'data/{name}.parquet'"),
    ],
)
def test_a_description_that_cannot_be_right_is_refused(path, change, message):
    file = path / "meta" / "info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DatasetError, match=message):
        read_path(LeRobot(), path)
