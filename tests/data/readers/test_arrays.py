"""Flat arrays in `.npz` files and folders of `.npy` files: names, ends, layouts, and what is refused."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.errors import DatasetError
from data.labels import episode_returns
from data.readers import recognise
from data.readers.arrays import Arrays
from data.readers.d4rl import D4RL
from tests.data.readers.reading import Read, read_path

LENGTHS = (9, 6)


@pytest.fixture
def plain(recording, last_rows) -> dict[str, np.ndarray]:
    """Two episodes of 9 and 6 steps; the first terminates, the second times out."""
    return recording(LENGTHS) | {"terminals": last_rows(LENGTHS, (0,)), "timeouts": last_rows(LENGTHS, (1,))}


@pytest.fixture
def read_npz(tmp_path: Path) -> Callable[..., Read]:
    """Writes arrays as an `.npz` file and reads it."""

    def through_file(arrays: dict[str, np.ndarray], **settings: object) -> Read:
        np.savez(tmp_path / "file.npz", **arrays)
        return read_path(Arrays.model_validate(settings), tmp_path / "file.npz")

    return through_file


def renamed(arrays: dict[str, np.ndarray], **names: str) -> dict[str, np.ndarray]:
    return {names.get(key, key): values for key, values in arrays.items()}


def ends(got: Read) -> tuple[list[int], list[bool], list[bool]]:
    data = got.trajectories
    return data.lengths.tolist(), data.terminated.tolist(), data.truncated.tolist()


# ---------------------------------------------------------------- the same data as elsewhere


def test_the_same_arrays_give_the_same_data_as_in_hdf5(read_npz, plain, write_hdf5):
    got, same = read_npz(plain), read_path(D4RL(), write_hdf5("file.hdf5", **plain))
    assert got.trajectories.digest() == same.trajectories.digest()
    np.testing.assert_array_equal(got.rewards, same.rewards)


@pytest.mark.parametrize(
    "names",
    [
        {"observations": "obs", "actions": "acts", "rewards": "reward", "terminals": "terminated"},
        {"observations": "states", "next_observations": "next_states", "timeouts": "truncations"},
        {"observations": "observation", "next_observations": "next_obs", "actions": "action", "timeouts": "truncated"},
    ],
)
def test_usual_names_are_taken_and_said(read_npz, plain, names):
    got = read_npz(renamed(plain, **names))
    assert got.trajectories.digest() == read_npz(plain).trajectories.digest()
    said = got.finding("keys").message
    assert all(f"{role}: '{name}'" in said for role, name in names.items())


def test_other_names_are_given(read_npz, plain):
    arrays = renamed(plain, observations="qpos_qvel", terminals="fell") | {"env": np.array("hopper"), "w": np.ones(3)}
    got = read_npz(arrays, keys={"observations": "qpos_qvel", "terminals": "fell"})
    assert got.trajectories.digest() == read_npz(plain).trajectories.digest()
    assert "env, w" in got.finding("other-keys").message and got.source.metadata == {"env": "hopper"}


def test_pixels_stay_bytes_and_discrete_actions_in_columns_become_ids(read_npz):
    """Three episodes of 4, 3 and 3 steps; the last one is cut without the observation that followed."""
    rng = np.random.default_rng(0)
    actions = np.array([0, 3, 1, 2, 0, 1, 3, 2, 2, 0])
    flags = np.zeros((2, 10), np.uint8)
    flags[0, [3, 6]], flags[1, 9] = 1, 1
    got = read_npz(
        {
            "observations": rng.integers(0, 255, (10, 8, 8, 3)).astype(np.uint8),
            "actions": actions[:, None],
            "rewards": np.array([1, -1, 0, 1, 0, 0, 2, 1, 1, -3], np.float32)[:, None],
            "terminals": flags[0],
            "timeouts": flags[1],
        }
    )
    data = got.trajectories
    assert data.observations.dtype == np.uint8 and data.observations.shape == (13, 8, 8, 3)
    assert data.actions.tolist() == actions.tolist() and data.n_actions == (4,)
    assert ends(got) == ([4, 3, 3], [True, True, False], [False, False, True])
    # 1-1+0+1, 0+0+2, 1+1-3
    assert episode_returns(got.rewards, data.offsets).tolist() == [1, 2, -1]
    assert (got.finding("final-observation-unknown").episode, got.finding("final-observation-unknown").step) == (2, 2)
    assert "(10, 1) read as (10,)" in got.finding("reshaped").message


def test_arrays_in_fortran_order_and_of_other_byte_orders_hold_the_same_numbers(read_npz, plain):
    odd = plain | {
        "observations": np.asfortranarray(plain["observations"].astype(">f8")),
        "actions": np.asfortranarray(plain["actions"]),
    }
    assert read_npz(odd).trajectories.digest() == read_npz(plain).trajectories.digest()


# ---------------------------------------------------------------- ends


def test_dones_stand_for_the_flag_that_is_missing(read_npz, plain):
    dones = plain["terminals"] | plain["timeouts"]
    expected = read_npz(plain).trajectories.digest()
    for missing in ("terminals", "timeouts"):
        got = read_npz({key: values for key, values in plain.items() if key != missing} | {"dones": dones})
        assert got.trajectories.digest() == expected
        assert got.finding("ends-taken").message.startswith("'dones' without '")


def test_dones_alone_do_not_say_how(read_npz, plain):
    arrays = renamed(plain, terminals="done")
    arrays["done"] = arrays["done"] | arrays.pop("timeouts")
    got = read_npz(arrays)
    assert ends(got) == ([9, 6], [False, False], [True, True])
    assert "say ends: terminated" in got.finding("ends-taken").message
    assert ends(read_npz(arrays, ends="terminated")) == ([9, 6], [True, True], [False, False])


def test_dones_beside_both_flags_are_listed(read_npz, plain):
    got = read_npz(plain | {"dones": np.ones(15)})
    assert ends(got) == ([9, 6], [True, False], [False, True]) and "dones" in got.finding("other-keys").message


def test_without_any_flags_the_rules_of_flat_recordings_cut_or_ask(read_npz, plain):
    del plain["terminals"], plain["timeouts"]
    got = read_npz(plain)  # the second episode begins far from the first one's last next observation
    assert ends(got) == ([9, 6], [False, False], [True, True]) and "no-terminals" in got.codes
    del plain["next_observations"]
    with pytest.raises(DatasetError, match="max_episode_steps"):
        read_npz(plain)
    assert ends(read_npz(plain, max_episode_steps=5))[0] == [5, 5, 5]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("actions"), r"'actions' is missing; arrays present: observations, .*keys: \{actions: "),
        (
            lambda a: a.update(obs=a["observations"]),
            r"which of observations, obs is meant.*keys: \{observations: obser",
        ),
        (lambda a: a.update(rewards=np.zeros(14)), r"15 observations but 14 rewards"),
        (lambda a: a.update(rewards=np.float32(1)), r"15 observations but 0 rewards"),
        (lambda a: a.update(observations=np.zeros((15, 0))), r"'observations' has shape \(15, 0\): no numbers"),
        (lambda a: a.update(terminals=np.full(15, 2)), r"'terminals' is 2 at row 0: flags are 0 or 1"),
        (lambda a: a.update(rewards=np.array(["a"] * 15)), r"'rewards' is <U1: expected numbers"),
        (
            lambda a: a.update(observations=np.array([[1.0], [2.0, 3.0]] * 7 + [[]], object)),
            r"'observations' holds Pyth",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(read_npz, plain, change, message):
    change(plain)
    with pytest.raises(DatasetError, match=rf"^file\.npz: {message}"):
        read_npz(plain)


def test_names_of_arrays_are_those_of_the_file_in_messages(read_npz, plain):
    arrays = renamed(plain, rewards="reward", observations="obs")
    with pytest.raises(DatasetError, match=r"15 observations \('obs'\) but 14 reward: "):
        read_npz(arrays | {"reward": np.zeros(14)})
    with pytest.raises(DatasetError, match=r"keys: there is no 'r'; arrays present: obs, "):
        read_npz(arrays, keys={"rewards": "r"})


def test_an_array_of_objects_is_never_opened(tmp_path):
    # What numpy would unpickle, written by hand: opening the file `sprung` for writing.
    header = {"descr": "|O", "fortran_order": False, "shape": ()}
    trap = io.BytesIO()
    np.lib.format.write_array_header_1_0(trap, header)
    trap.write(f"cbuiltins\nopen\n(V{tmp_path / 'sprung'}\nVw\ntR.".encode())
    (tmp_path / "data.npy").write_bytes(trap.getvalue())
    np.savez(tmp_path / "data.npz", actions=np.zeros(1))
    with zipfile.ZipFile(tmp_path / "data.npz", "a") as archive:
        archive.writestr("observations.npy", trap.getvalue())
    for name in ("data.npy", "data.npz"):
        path = tmp_path / name
        with pytest.raises(DatasetError, match=rf"^{name}: "):
            recognise(path).open(path)
    assert not (tmp_path / "sprung").exists()


def test_one_array_is_not_enough(tmp_path):
    np.save(tmp_path / "observations.npy", np.zeros((5, 2)))
    with pytest.raises(DatasetError, match=r"^observations\.npy: not an \.npz file"):
        recognise(tmp_path / "observations.npy").open(tmp_path / "observations.npy")
