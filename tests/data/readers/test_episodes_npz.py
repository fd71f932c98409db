"""Episodes in .npz files: which rows are steps, how episodes ended, and files that are not like the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.errors import DatasetError
from data.readers import recognise
from data.readers.episodes_npz import EpisodesNpz
from data.readers.reader import RefusedError
from tests.data.readers.reading import Read, read_path
from tests.data.readers.samples import LENGTHS, episode_rows, recording

Change = Callable[[dict[str, np.ndarray], int], None]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes the recording after a change: `written(change, empty)`; `change` gets the arrays of each episode."""

    def write(change: Change = lambda arrays, episode: None, empty: int = -1) -> Path:
        for episode in range(len(LENGTHS)):
            arrays = episode_rows(recording(), episode, empty)
            change(arrays, episode)
            np.savez(tmp_path / f"episode-{episode}.npz", **arrays)
        return tmp_path

    return write


def without(*keys: str) -> Change:
    def change(arrays: dict[str, np.ndarray], episode: int) -> None:
        for key in keys:
            del arrays[key]

    return change


def in_episode(chosen: int, **values: object) -> Change:
    def change(arrays: dict[str, np.ndarray], episode: int) -> None:
        if episode == chosen:
            arrays |= {key: np.asarray(value) for key, value in values.items()}

    return change


def same_steps(got: Read) -> None:
    recorded = recording()
    assert got.trajectories.lengths.tolist() == list(LENGTHS)
    np.testing.assert_array_equal(got.trajectories.observations, np.concatenate(recorded.observations))
    np.testing.assert_array_equal(got.trajectories.actions, np.concatenate(recorded.actions))
    np.testing.assert_array_equal(got.rewards, np.concatenate(recorded.rewards))


# ---------------------------------------------------------------- which rows are steps


@pytest.mark.parametrize(("layout", "empty"), [("rlds", -1), ("dreamer", 0)])
def test_the_row_that_is_no_step_is_seen_or_said_and_on_record(written, layout, empty):
    path = written(empty=empty)
    seen = read_path(EpisodesNpz(), path)
    same_steps(seen)
    where = {"rlds": "the last row is no step", "dreamer": "the first row is no step"}[layout]
    assert where in seen.finding("layout-taken").message
    said = read_path(EpisodesNpz(layout=layout), path)
    same_steps(said)
    assert "layout-taken" not in said.codes


def test_the_other_layout_gives_every_observation_the_action_before(written):
    # In RLDS's files read as Dreamer's, the action in row t + 1 becomes that of step t: one late in every episode.
    shifted = read_path(EpisodesNpz(layout="dreamer"), written()).trajectories
    first = recording().actions[0]
    np.testing.assert_array_equal(shifted.actions[:4], [*first[1:], [0, 0]])


@pytest.mark.parametrize("which", ["both are", "neither is"])
def test_where_no_row_tells_the_layout_is_asked_for(written, which):
    def change(arrays, episode):
        for key in ("action", "reward"):
            arrays[key][[0, -1]] = 0 if which == "both are" else 1

    path = written(change)
    with pytest.raises(RefusedError, match=rf"{which} empty in every file\. Say it: layout: rlds .*layout: dreamer"):
        read_path(EpisodesNpz(), path)
    assert read_path(EpisodesNpz(layout="rlds"), path).trajectories.lengths.tolist() == list(LENGTHS)


def test_an_empty_row_may_hold_nan(written):
    def change(arrays, episode):
        arrays["action"][-1] = arrays["reward"][-1] = np.nan

    same_steps(read_path(EpisodesNpz(), written(change)))


def test_a_file_that_is_not_empty_where_the_others_are_is_named(written, monkeypatch):
    monkeypatch.setattr("data.readers.episodes_npz.PROBES", 3)
    path = written(in_episode(7, reward=np.ones(LENGTHS[7] + 1)))
    with pytest.raises(DatasetError, match=r"^episode-7\.npz: its last row is not empty, as it is in the files before"):
        read_path(EpisodesNpz(), path)


def test_one_more_observation_than_actions_leaves_no_question(written):
    def change(arrays, episode):
        for key in ("action", "reward", "is_terminal"):
            arrays[key] = arrays[key][1 if key == "is_terminal" else 0 :][: LENGTHS[episode]]

    got = read_path(EpisodesNpz(), written(change))
    same_steps(got)
    assert got.trajectories.terminated.tolist() == recording().terminated and "layout-taken" not in got.codes


def test_rows_that_are_all_steps_have_no_observation_after_the_last(written):
    def change(arrays, episode):
        for key in ("is_first", "is_last"):
            del arrays[key]
        arrays["done"] = arrays.pop("is_terminal")[1:]
        for key in ("observation", "action", "reward"):
            arrays[key] = arrays[key][:-1]

    got = read_path(EpisodesNpz(), written(change))
    assert got.trajectories.lengths.tolist() == list(LENGTHS) and not got.trajectories.final_observed.any()
    assert "every row is a step" in got.finding("layout-taken").message
    assert "'done'" in got.finding("ends-taken").message and got.trajectories.truncated.all()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("place", ["row", "step"])
def test_a_discount_of_zero_terminates(written, place):
    def change(arrays, episode):
        terminal = arrays.pop("is_terminal")
        arrays["discount"] = 1 - (np.roll(terminal, -1) if place == "step" else terminal).astype(np.float32)

    got = read_path(EpisodesNpz(), written(change)).trajectories
    assert got.terminated.tolist() == recording().terminated
    assert got.truncated.tolist() == [not terminated for terminated in recording().terminated]


def test_without_any_flag_the_end_of_a_file_is_what_the_setting_says(written):
    path = written(without("is_terminal", "is_last"))
    got = read_path(EpisodesNpz(), path)
    assert got.trajectories.truncated.all() and "nothing marks" in got.finding("ends-taken").message
    assert read_path(EpisodesNpz(ends="terminated"), path).trajectories.terminated.all()


def test_an_episode_that_is_not_at_its_end_is_kept_as_truncated_and_said(written):
    got = read_path(EpisodesNpz(), written(in_episode(3, is_last=np.zeros(LENGTHS[3] + 1, bool))))
    found = got.finding("unfinished-episodes")
    assert (found.episode, found.count) == (3, 1) and "episode-3.npz" in found.message


@pytest.mark.parametrize(("key", "row"), [("is_first", 2), ("is_last", 1)])
def test_several_episodes_in_one_file_are_refused(written, key, row):
    flags = np.arange(LENGTHS[4] + 1) == row
    with pytest.raises(DatasetError, match=rf"^episode-4\.npz: '{key}' inside the file: several episodes"):
        read_path(EpisodesNpz(), written(in_episode(4, **{key: flags})))


# ---------------------------------------------------------------- arrays


def test_images_stay_bytes_and_columns_of_one_number_are_flat(written):
    def change(arrays, episode):
        n = LENGTHS[episode]
        arrays["image"] = np.full((n + 1, 4, 4, 3), episode, np.uint8)
        del arrays["observation"]
        arrays["reward"] = arrays["reward"][:, None]
        arrays["action"] = np.pad(np.arange(1, n + 1), (0, 1))[:, None]

    got = read_path(EpisodesNpz(n_actions=9), written(change))
    assert got.trajectories.observations.shape == (sum(LENGTHS) + len(LENGTHS), 4, 4, 3)
    assert got.trajectories.observations.dtype == np.uint8 and got.trajectories.observations[-1].max() == 11
    assert got.trajectories.actions.dtype == np.int64 and got.trajectories.actions[:5].tolist() == [1, 2, 3, 4, 1]
    np.testing.assert_array_equal(got.rewards, np.concatenate(recording().rewards))


def test_several_observations_are_joined_or_chosen(written):
    def change(arrays, episode):
        whole = arrays.pop("observation")
        arrays["observation/position"], arrays["observation/velocity"] = whole[:, :1], whole[:, 1:]
        arrays["physics"] = whole

    path = written(change)
    joined = read_path(EpisodesNpz(), path)
    np.testing.assert_array_equal(joined.trajectories.observations, np.concatenate(recording().observations))
    assert "physics" in joined.finding("other-keys").message
    chosen = read_path(EpisodesNpz(observation_keys=("physics",)), path)
    np.testing.assert_array_equal(chosen.trajectories.observations, np.concatenate(recording().observations))


def test_objects_are_refused_and_never_unpickled(written):
    objects = np.array([{"a": 1}] * (LENGTHS[5] + 1), dtype=object)
    with pytest.raises(DatasetError, match=r"^episode-5\.npz: 'reward' holds Python objects, which only pickle"):
        read_path(EpisodesNpz(), written(in_episode(5, reward=objects)))
    got = read_path(EpisodesNpz(), written(in_episode(0, infos=np.array([{}], dtype=object))))
    assert "infos" in got.finding("other-keys").message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("action"), r"no 'action' in episode-0\.npz; arrays present: observation, reward"),
        (without("observation"), r"no 'observation' in episode-0.*Say which are observations with observation_keys"),
        (in_episode(0, actions=np.zeros((5, 2))), r"'action' and 'actions' are both there"),
        (in_episode(0, action=np.array(["left"] * 5)), r"'action' is <U4: expected numbers"),
        (in_episode(2, reward=1.0), r"'reward' is a single value: expected one row a time point"),
        (in_episode(6, is_terminal=np.full(LENGTHS[6] + 1, 2)), r"'is_terminal' is 2 at step 0: flags are 0 or 1"),
        (in_episode(6, observation=np.zeros((LENGTHS[6] + 1, 2))), r"'observations' has rows of float64 \(2,\)"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(written, change, message):
    with pytest.raises(DatasetError, match=message):
        read_path(EpisodesNpz(), written(change))


def test_a_missing_array_is_named_with_its_file(written):
    def change(arrays, episode):
        if episode == 8:
            del arrays["reward"]

    with pytest.raises(DatasetError, match=r"^episode-8\.npz: 'reward' is missing; arrays present: observation, act"):
        read_path(EpisodesNpz(), written(change))


def test_one_file_alone_is_an_episode_too(written):
    path = written() / "episode-1.npz"
    assert recognise(path) == EpisodesNpz()
    got = read_path(EpisodesNpz(), path).trajectories
    assert got.lengths.tolist() == [LENGTHS[1]] and got.truncated.tolist() == [True]


def test_a_folder_without_episodes_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"no steps: the folder has no \.npz files"):
        EpisodesNpz().open(tmp_path)
