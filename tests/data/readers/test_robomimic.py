"""robomimic files: demonstrations, parts, ends and what follows the last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from data.errors import DatasetError
from data.readers.reader import RefusedError
from data.readers.robomimic import Robomimic
from tests.data.readers.reading import Read, read_path
from tests.data.readers.samples import LENGTHS, recording, write_robomimic


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Twelve demonstrations with one observation key, `flat`."""
    return write_robomimic(tmp_path, recording())


@pytest.fixture
def edited(path: Path) -> Callable[..., Read]:
    """Reads the file after a change: `edited(change, **settings)`, where `change` gets the open file."""

    def read(change: Callable[[h5py.File], object], **settings: object) -> Read:
        with h5py.File(path, "a") as file:
            change(file)
        return read_path(Robomimic.model_validate(settings), path)

    return read


def demonstrations(file: h5py.File) -> list[h5py.Group]:
    return [file[f"data/demo_{e}"] for e in range(len(LENGTHS))]


def replace(group: h5py.Group, key: str, values: object) -> None:
    del group[key]
    group[key] = values


# ---------------------------------------------------------------- ends


def test_an_end_is_what_the_setting_says_it_is(path):
    truncated = read_path(Robomimic(), path)
    assert truncated.trajectories.truncated.all() and not truncated.trajectories.terminated.any()
    said = truncated.finding("ends-taken").message
    assert "'dones'" in said and "taken as truncated" in said and "ends: terminated" in said
    terminated = read_path(Robomimic(ends="terminated"), path)
    assert terminated.trajectories.terminated.all() and not terminated.trajectories.truncated.any()
    assert "as asked" in terminated.finding("ends-taken").message


def test_an_end_that_is_not_marked_is_truncated(edited):
    got = edited(lambda file: replace(file["data/demo_2"], "dones", np.zeros(LENGTHS[2], int)), ends="terminated")
    assert np.flatnonzero(got.trajectories.truncated).tolist() == [2]
    found = got.finding("unfinished-episodes")
    assert (found.episode, found.count) == (2, 1) and "demo_2" in found.message


def test_marks_of_success_before_the_end_do_not_cut(edited):
    got = edited(lambda file: replace(file["data/demo_1"], "dones", [0, 0, 1, 1, 1, 1]))
    assert got.trajectories.lengths.tolist() == list(LENGTHS)
    assert "demo_1" in got.finding("flags-inside").message


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
@pytest.mark.parametrize(
    ("dones", "message"), [([0, 0, 0.5], "'dones' is 0.5 at step 2"), ([0, 1], "'dones' is int64")]
)
def test_marks_that_cannot_be_right_are_named(edited, ends, dones, message):
    with pytest.raises(DatasetError, match=rf"^demonstrations\.hdf5: demo_3: {message}"):
        edited(lambda file: replace(file["data/demo_3"], "dones", dones), ends=ends)


def test_without_any_marks_the_setting_speaks_of_every_end(edited):
    def unmark(file: h5py.File) -> None:
        for demonstration in demonstrations(file):
            del demonstration["dones"]

    got = edited(unmark, ends="terminated")
    assert got.trajectories.terminated.all() and "nothing marks" in got.finding("ends-taken").message


# ---------------------------------------------------------------- what follows the last step


def test_without_next_observations_the_final_one_is_not_known(edited):
    def cut(file: h5py.File) -> None:
        for demonstration in demonstrations(file):
            del demonstration["next_obs"]

    got = edited(cut)
    assert not got.trajectories.final_observed.any() and got.finding("final-observation-unknown").count == len(LENGTHS)
    assert "next-observations-disagree" not in got.codes


@pytest.mark.parametrize("kind", ["repeated", "shifted"])
def test_next_observations_that_are_not_the_episodes_own_are_not_believed(edited, kind):
    def spoil(file: h5py.File) -> None:
        demonstration = file["data/demo_4"]
        following = demonstration["next_obs/flat"][:]
        if kind == "repeated":
            following[-1] = demonstration["obs/flat"][-1]
        else:
            following = np.roll(following, 1, axis=0)
        replace(demonstration, "next_obs/flat", following)

    got = edited(spoil)
    assert np.flatnonzero(~got.trajectories.final_observed).tolist() == [4]
    assert got.finding("next-observations-disagree").count == 1
    assert "demo_4" in got.finding("final-observation-unknown").message


def test_next_observations_of_another_shape_are_refused(edited):
    with pytest.raises(RefusedError, match=r"'data/demo_0/next_obs/flat' has shape \(3, 3\) and 'obs/flat' \(4, 3\)"):
        edited(lambda file: replace(file["data/demo_0"], "next_obs/flat", np.zeros((3, 3), np.float32)))


# ---------------------------------------------------------------- parts


def test_a_part_is_read_by_its_filter_key_in_the_order_of_numbers(edited):
    def mask(file: h5py.File) -> None:
        file["mask/train"] = np.array([b"demo_10", b"demo_2", b"demo_0"])
        file["mask/valid"] = np.array([b"demo_1"])

    got = edited(mask, filter_key="train")
    assert got.trajectories.lengths.tolist() == [LENGTHS[0], LENGTHS[2], LENGTHS[10]]
    assert "3 of 12 demonstrations are read" in got.finding("filter-key").message
    assert got.source.n_steps == got.trajectories.n_steps
    whole = edited(lambda file: None)
    assert whole.trajectories.n_episodes == 12
    assert "train (3), valid (1)" in whole.finding("filter-keys").message
    assert whole.source.metadata["filter_keys"] == {"train": 3, "valid": 1}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "no filter key 'train'; present: none"),
        ([b"demo_99"], "'mask/train' names 'demo_99', which is not in the file"),
        (np.zeros(0, "S6"), "'mask/train' is empty"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused(edited, names, message):
    with pytest.raises(RefusedError, match=rf"^demonstrations\.hdf5: {message}"):
        edited(lambda file: names is not None and file.create_dataset("mask/train", data=names), filter_key="train")


# ---------------------------------------------------------------- content


def test_keys_are_chosen_and_joined(edited):
    def add(file: h5py.File) -> None:
        for demonstration in demonstrations(file):
            n = len(demonstration["actions"])
            for group in ("obs", "next_obs"):
                demonstration[f"{group}/agentview_image"] = np.full((n, 8, 8, 3), 7, np.uint8)
                demonstration[f"{group}/gripper"] = np.full((n, 1), 0.5)

    with pytest.raises(RefusedError, match=r"'agentview_image' of shape \(8, 8, 3\) cannot be joined"):
        edited(add)
    got = edited(lambda file: None, observation_keys=("gripper", "flat"))
    assert got.trajectories.observations.shape[1:] == (4,) and (got.trajectories.observations[:, 0] == 0.5).all()
    images = edited(lambda file: None, observation_keys=("agentview_image",)).trajectories.observations
    assert images.dtype == np.uint8 and images.shape[1:] == (8, 8, 3) and (images == 7).all()


def test_the_environment_is_kept_as_what_it_says(path):
    with Robomimic().open(path) as source:
        assert source.metadata["env_args"] == {"env_name": "Toy", "type": 1, "env_kwargs": {}}
        assert source.metadata["total"] == source.n_steps == sum(LENGTHS)


def test_what_is_not_read_or_not_there_any_more_is_said(edited):
    got = edited(lambda file: file.move("data/demo_3", "data/demonstration_3"))
    assert got.trajectories.n_episodes == 11
    assert "demonstration_3" in got.finding("other-keys").message
    # 56 steps in all, 3 of them in the renamed one
    assert "says 56 steps in all, and its demonstrations have 53" in got.finding("total-differs").message


def test_a_name_that_is_no_text_is_said(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"demo_9\0", b"demo_\xff\0"))
    got = read_path(Robomimic(), path)
    assert got.trajectories.n_episodes == 11 and r"demo_\xff" in got.finding("other-keys").message


def test_rewards_are_optional(edited):
    def unreward(file: h5py.File) -> None:
        for demonstration in demonstrations(file):
            del demonstration["rewards"]

    assert edited(unreward).rewards is None


def test_raw_demonstrations_are_refused_with_what_to_do(edited):
    def raw(file: h5py.File) -> None:
        for demonstration in demonstrations(file):
            del demonstration["obs"], demonstration["next_obs"]
            demonstration["states"] = np.zeros((3, 5))

    with pytest.raises(RefusedError, match=r"'data/demo_0' has no observations .*states.*dataset_states_to_obs\.py"):
        edited(raw)


@pytest.mark.parametrize("key", ["actions", "rewards", "dones", "obs/flat"])
def test_a_key_that_one_demonstration_lacks_is_named(edited, key):
    with pytest.raises(RefusedError, match=f"'data/demo_5/{key}' is missing"):
        edited(lambda file: file["data/demo_5"].__delitem__(key))


def test_integer_actions_are_discrete_with_a_count_over_all_demonstrations(edited):
    def discrete(file: h5py.File) -> None:
        for e, demonstration in enumerate(demonstrations(file)):
            replace(demonstration, "actions", np.full((LENGTHS[e], 1), e))

    got = edited(discrete)
    assert got.trajectories.n_actions == (12,) and got.trajectories.actions.shape == (sum(LENGTHS),)
    assert "n-actions-taken" in got.codes
