"""Dumps of d3rlpy; those in `files` were written by d3rlpy 2.8.1 itself, from twelve steps in three episodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from data.errors import DatasetError
from data.labels import episode_returns
from data.readers import recognise
from data.readers.d3rlpy import D3rlpy
from data.readers.d4rl import D4RL
from tests.data.readers.reading import Read, read_path

FILES = Path(__file__).parent / "files"
CONTINUOUS, TUPLE = FILES / "d3rlpy-continuous.h5", FILES / "d3rlpy-tuple-discrete.h5"


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Read]:
    """Reads a changed copy: `edited(change)`, where `change` gets the open file."""

    def read(change: Callable[[h5py.File], object]) -> Read:
        path = shutil.copy(CONTINUOUS, tmp_path / "dump.h5")
        with h5py.File(path, "a") as file:
            change(file)
        return read_path(D3rlpy(), path)

    return read


def replace(file: h5py.File, key: str, value: object) -> None:
    del file[key]
    file[key] = value


def test_what_d3rlpy_wrote_is_read_back():
    assert recognise(CONTINUOUS) == D3rlpy()
    got = read_path(D3rlpy(), CONTINUOUS)
    data = got.trajectories
    assert data.lengths.tolist() == [5, 3, 4] and got.source.n_steps == 12
    assert data.terminated.tolist() == [True, False, True] and data.truncated.tolist() == [False, True, False]
    np.testing.assert_array_equal(data.step_observations, np.arange(36).reshape(12, 3) / 8)
    np.testing.assert_array_equal(data.actions, np.arange(24).reshape(12, 2) / 32 - 0.5)
    # 1+..+5, 6+7+8, 9+..+12
    assert episode_returns(got.rewards, data.offsets).tolist() == [15, 21, 42]
    assert got.source.metadata == {"version": "2.1"}


def test_a_truncated_last_step_is_no_transition_and_a_terminated_one_is():
    got = read_path(D3rlpy(), CONTINUOUS)
    assert not got.trajectories.final_observed.any()
    assert sorted(set(range(12)) - set(got.trajectories.transition_index.tolist())) == [7]
    unknown = got.finding("final-observation-unknown")
    assert (unknown.episode, unknown.step, unknown.count) == (1, 2, 1)


def test_parts_of_tuple_observations_are_joined_or_chosen_and_actions_may_be_discrete():
    got = read_path(D3rlpy(), TUPLE)
    steps = got.trajectories.step_observations
    np.testing.assert_array_equal(steps[:, :3], np.arange(36).reshape(12, 3) / 8)
    np.testing.assert_array_equal(steps[:, 3], np.arange(0, 36, 3))
    assert "0 (3,), 1 (1,), in this order" in got.finding("observation-keys").message
    assert got.trajectories.n_actions == (3,) and got.trajectories.actions.tolist() == [0, 1, 2] * 4
    assert "n-actions-taken" in got.codes
    chosen = read_path(D3rlpy(observation_keys=("1",), n_actions=5), TUPLE).trajectories
    assert chosen.observations.dtype == np.uint8 and chosen.observations.shape == (15, 1)
    assert chosen.n_actions == (5,)


def test_a_column_of_a_users_own_episodes_is_listed(edited):
    columns = ["observations", "actions", "rewards", "terminated", "goals"]
    assert "goals" in edited(lambda file: replace(file, "columns", columns)).finding("other-keys").message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.pop("actions_1"), r"'actions_1' is missing.*'num_episodes' says 3"),
        (lambda file: file.pop("terminated_2"), r"'terminated_2' is missing"),
        (lambda file: replace(file, "columns", ["observations", "actions"]), r"no column 'terminated'; columns pres"),
        (lambda file: replace(file, "num_episodes", 0), r"no steps: the dump has no episodes"),
        (lambda file: replace(file, "num_episodes", "three"), r"'num_episodes' three: not a dump"),
        (lambda file: replace(file, "terminated_1", 3), r"'terminated_1' is 3: flags are 0 or 1"),
        (lambda file: replace(file, "rewards_1", np.zeros((2, 1))), r"episode 1: 'rewards' is float64 of shape \(2, 1"),
        (lambda file: replace(file, "observations_2", np.zeros((4, 2))), r"episode 2: 'observations' has rows of"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(edited, change, message):
    with pytest.raises(DatasetError, match=rf"^dump\.h5: .*{message}"):
        edited(change)


def test_fewer_episodes_announced_than_there_are_is_said(edited):
    got = edited(lambda file: replace(file, "num_episodes", 2))
    assert got.trajectories.n_episodes == 2 and "'actions_2'" in got.finding("more-episodes").message


def test_dumps_of_version_1_are_flat_and_mark_every_end(write_hdf5):
    # `episode_terminals` of d3rlpy 1: also where an episode was cut, at rows 1 and 5.
    path = write_hdf5(
        "v1.h5",
        observations=np.arange(12.0).reshape(6, 2),
        actions=np.zeros((6, 1)),
        rewards=np.arange(1.0, 7.0),
        terminals=np.array([0, 0, 0, 1, 0, 0.0]),
        episode_terminals=np.array([0, 1, 0, 1, 0, 1.0]),
        discrete_action=False,
        version="1.0",
    )
    assert recognise(path) == D4RL()
    got = read_path(D4RL(), path)
    assert got.trajectories.lengths.tolist() == [2, 2, 2]
    assert got.trajectories.terminated.tolist() == [False, True, False]
    assert got.trajectories.truncated.tolist() == [True, False, True]
    assert "'episode_terminals'" in got.finding("ends-taken").message
    assert got.finding("final-observation-unknown").count == 2
