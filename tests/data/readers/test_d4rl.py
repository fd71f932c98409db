"""D4RL files as people have them: layouts, declarations, damage."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from data.errors import DatasetError
from data.ingest import ingest
from data.labels import episode_returns
from data.readers import recognise
from data.readers.d4rl import D4RL
from data.store import Store


@pytest.fixture
def plain(recording, last_rows):
    """Two episodes of 9 and 6 steps; the first terminates, the second times out."""
    n = (9, 6)
    rewards = np.round(np.random.default_rng(0).normal(size=15), 2).astype(np.float32)
    return recording(n) | {"rewards": rewards, "terminals": last_rows(n, (0,)), "timeouts": last_rows(n, (1,))}


def test_real_data_is_read_as_its_description_says(read, hopper):
    got = read(hopper / "hopper-replay.hdf5")
    data = got.trajectories
    assert (data.n_steps, data.n_episodes) == (100_000, 423)
    assert int(data.terminated.sum()) == 391 and int(data.truncated.sum()) == 32
    assert data.lengths[-1] == 819 and got.finding("unfinished-last-episode").episode == 422
    assert got.rewards.sum(dtype=np.float64) == pytest.approx(329418.1029, abs=1e-4)
    returns = episode_returns(got.rewards, data.offsets)
    assert returns[:-1].mean() == pytest.approx(773.46, abs=5e-3) and returns.max() == pytest.approx(3750.0, abs=0.05)
    with h5py.File(hopper / "hopper-replay.hdf5") as file:
        steps = np.arange(data.n_steps) + data.episode_index
        np.testing.assert_array_equal(data.observations[steps], file["observations"][:])
        np.testing.assert_array_equal(data.observations[steps + 1], file["next_observations"][:])
        np.testing.assert_array_equal(data.actions, file["actions"][:])


def test_rewards_are_optional(read, plain):
    del plain["rewards"]
    assert read(plain).rewards is None


def test_an_odd_layout_holds_the_same_data(read, write_hdf5, plain):
    odd = {
        "observations": plain["observations"].astype(np.float64),
        "next_observations": plain["next_observations"].astype(">f8"),
        "actions": plain["actions"].astype(">f4"),
        "rewards": plain["rewards"].astype(np.float64)[:, None],
        "terminals": plain["terminals"].astype(np.uint8)[:, None],
        "timeouts": plain["timeouts"].astype(np.float32),
        "metadata__algorithm": np.bytes_("SAC"),
        "metadata__notes": "gemischt, näher unbekannt",
        "infos__qpos": np.zeros((15, 2)),
    }
    got, same = read(odd, {"env": np.bytes_("hopper")}), read(plain)
    assert got.trajectories.digest() == same.trajectories.digest()
    np.testing.assert_array_equal(got.rewards, same.rewards)
    converted = [f.message for f in got.findings if f.code == "converted"]
    assert len(converted) == 6 and "'rewards': <f8 converted to float32." in converted
    assert "infos/qpos" in got.finding("other-keys").message
    with D4RL().open(write_hdf5("odd.hdf5", {"env": np.bytes_("hopper")}, **odd)) as source:
        assert source.metadata == {
            "env": "hopper",
            "metadata/algorithm": "SAC",
            "metadata/notes": "gemischt, näher unbekannt",
        }
        assert source.observation.dtype == "float64" and source.observation.shape == (3,)


def test_float16_is_read_without_loss(read, plain):
    half = plain | {key: plain[key].astype(np.float16) for key in ("observations", "next_observations", "rewards")}
    got = read(half)
    assert got.trajectories.observations.dtype == np.float32
    np.testing.assert_array_equal(got.rewards, half["rewards"].astype(np.float32))


def test_images_stay_bytes(read, plain):
    images = np.random.default_rng(0).integers(0, 255, (16, 4, 4, 3)).astype(np.uint8)
    got = read(plain | {"observations": images[:-1], "next_observations": images[1:]})
    assert got.trajectories.observations.dtype == np.uint8 and got.trajectories.observations.shape == (17, 4, 4, 3)


def test_scalars_become_vectors_of_one_dimension(read, plain):
    flat = plain | {key: plain[key][:, 0] for key in ("observations", "next_observations", "actions")}
    got = read(flat)
    assert got.trajectories.observations.shape == (17, 1) and got.trajectories.actions.shape == (15, 1)


# ---------------------------------------------------------------- actions


def test_integer_actions_are_discrete_with_the_declared_number(read, plain):
    ids = np.array([0, 2, 3] * 5)
    for got in (
        read(plain | {"actions": ids[:, None]}, {"action_count": 5}),
        read(plain | {"actions": ids[:, None]}, n_actions=5),
    ):
        assert got.trajectories.n_actions == (5,) and got.trajectories.actions.shape == (15,)
        assert got.trajectories.actions.tolist() == ids.tolist()
        assert "n-actions-taken" not in got.codes


def test_an_undeclared_number_of_actions_is_taken_from_the_highest_id_and_said(read, plain):
    got = read(plain | {"actions": np.array([0, 2, 3] * 5)})
    assert got.trajectories.n_actions == (4,) and got.finding("n-actions-taken").severity == "warning"
    assert set(got.trajectories.actions.tolist()) == {0, 2, 3}


def test_whole_floats_are_continuous(read, plain):
    got = read(plain | {"actions": np.array([[5.0, 1.0], [7.0, 2.0], [9.0, 3.0]] * 5)})
    assert got.trajectories.n_actions is None and got.trajectories.actions.dtype == np.float32


def test_whole_floats_declared_discrete_are_discrete(read, refusal, plain, write_hdf5):
    got = read(plain | {"actions": np.array([0.0, 1.0, 2.0] * 5)}, n_actions=3)
    assert got.trajectories.actions.dtype == np.int64
    path = write_hdf5("half.hdf5", **(plain | {"actions": np.full(15, 0.5)}))
    with (
        pytest.raises(DatasetError, match=r"half\.hdf5: 'actions' is 0\.5 at row 0"),
        D4RL(n_actions=3).open(path) as s,
    ):
        list(s.blocks())


def test_multi_discrete_actions_have_a_count_for_each_dimension(read, refusal, plain):
    ids = np.stack([np.arange(15) % 3, np.arange(15) % 2], 1)
    assert read(plain | {"actions": ids}, {"action_count": [3, 4]}).trajectories.n_actions == (3, 4)
    assert read(plain | {"actions": ids}).trajectories.n_actions == (3, 2)
    assert "one positive count for each" in refusal(plain | {"actions": ids}, n_actions=(3, 4, 5))


def test_an_action_id_beyond_the_declared_number_is_refused(refusal, plain):
    ids = np.array([0, 2, 3] * 5)
    assert "episode 0, step 2 (3)" in refusal(plain | {"actions": ids}, n_actions=3, out_of_bounds="clip")
    assert "(-1)" in refusal(plain | {"actions": ids - 1}, n_actions=3)


def test_actions_beyond_their_bounds_are_refused_or_clipped_and_rounding_is_not_beyond(read, refusal, plain):
    actions = np.zeros((15, 3), np.float32)
    actions[:4] = [[1, -1, 0.5], [0.99999994, -0.99999994, 0], [1.0000001, 0.2, -1], [0, 0, 0]]
    inside = read(plain | {"actions": actions}, {"action_low": -1.0, "action_high": 1.0})
    assert inside.trajectories.action_bounds == (-1, 1)
    np.testing.assert_array_equal(inside.trajectories.actions, actions)
    actions[4] = [1.2, -0.3, 0.1]
    assert "episode 0, step 4 (1.2)" in refusal(plain | {"actions": actions}, action_bounds=(-1, 1))
    clipped = read(plain | {"actions": actions}, action_bounds=(-1, 1), out_of_bounds="clip")
    assert clipped.trajectories.actions[4, 0] == 1 and clipped.trajectories.actions[2, 0] == actions[2, 0]
    assert clipped.finding("action-out-of-bounds").count == 1


def test_bounds_that_differ_between_dimensions_are_said_not_kept(read, plain):
    got = read(plain, {"action_low": [-1.0, -2.0], "action_high": [1.0, 2.0]})
    assert got.trajectories.action_bounds is None and "action-bounds-differ" in got.codes
    same = read(plain, {"action_low": [-1.0, -1.0], "action_high": [1.0, 1.0]})
    assert same.trajectories.action_bounds == (-1, 1)
    assert read(plain, {"action_low": -np.inf, "action_high": np.inf}).trajectories.action_bounds is None


# ---------------------------------------------------------------- not finite


@pytest.fixture
def spoiled(recording, last_rows):
    n = (7, 6, 5)
    arrays = recording(n) | {"timeouts": last_rows(n)}
    arrays["observations"][5, 1] = arrays["next_observations"][4, 1] = np.nan
    arrays["actions"][9, 0] = np.inf
    arrays["rewards"][12] = np.nan
    return arrays


def test_what_is_not_finite_is_named_by_key_episode_and_step(refusal, spoiled):
    message = refusal(spoiled)
    assert "'observations' is not finite at episode 0, step 5 (nan)" in message
    assert "'actions' is not finite at episode 1, step 2 (inf)" in message
    assert "'rewards' is not finite at episode 1, step 5 (nan)" in message
    assert "not_finite: leave_out" in message


def test_episodes_that_are_not_finite_are_left_out_on_request(read, spoiled):
    got = read(spoiled, not_finite="leave_out")
    assert got.trajectories.lengths.tolist() == [5] and got.rewards.tolist() == [14, 15, 16, 17, 18]
    assert got.finding("episodes-left-out").count == 2
    assert got.finding("episodes-left-out").message.startswith("2 episodes with 13 steps")


def test_a_final_observation_that_is_not_finite_counts_as_the_step_after_the_last(refusal, recording, last_rows):
    arrays = recording((7, 5)) | {"timeouts": last_rows((7, 5))}
    arrays["next_observations"][6] = np.inf
    assert "'observations' is not finite at episode 0, step 7 (inf)" in refusal(arrays)


def test_rewards_alone_that_are_not_finite_refuse_nothing(read, recording, last_rows):
    arrays = recording((7, 5)) | {"timeouts": last_rows((7, 5))}
    arrays["rewards"][3] = np.nan
    got = read(arrays)
    assert got.trajectories.n_steps == 12
    found = got.finding("not-finite")
    assert found.severity == "warning" and "without `source` labels" in found.message
    assert (found.episode, found.step) == (0, 3)


def test_a_number_too_large_for_float32_is_not_finite(refusal, plain):
    observations = plain["observations"].astype(np.float64)
    observations[3, 0] = 1e300
    assert "step 3 (inf)" in refusal(plain | {"observations": observations})


def test_nothing_left_is_refused(refusal, plain):
    plain["observations"][[0, 12]] = np.nan
    assert "not one episode" in refusal(plain, not_finite="leave_out")


# ---------------------------------------------------------------- files that cannot be right


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": np.zeros((14, 2))}, "15 observations but 14 actions"),
        ({"observations": np.zeros((16, 3))}, "16 observations but 15 actions"),
        ({"rewards": np.zeros((15, 15))}, r"'rewards' has shape (15, 15); expected (15,) or (15, 1)"),
        (
            {"next_observations": np.zeros((15, 4))},
            r"'next_observations' have shape (15, 4) and 'observations' (15, 3)",
        ),
        ({"terminals": np.full(15, 0.5)}, "'terminals' is 0.5 at row 0: flags are 0 or 1"),
        ({"timeouts": np.full(15, np.nan)}, "'timeouts' is nan at row 0"),
        ({"observations": np.full((15, 3), b"x")}, "'observations' are |S1: expected numbers"),
        ({"observations": np.zeros((15, 0))}, "no numbers"),
    ],
)
def test_columns_that_cannot_be_right_are_refused(refusal, plain, change, message):
    assert message in refusal(plain | change)


@pytest.mark.parametrize("key", ["observations", "actions", "terminals"])
def test_a_missing_key_is_named_with_the_keys_there_are(refusal, plain, key):
    del plain[key]
    message = refusal(plain)
    assert f"'{key}' is missing" in message and "rewards" in message


def test_no_steps_is_refused(refusal, plain):
    assert "no steps" in refusal({key: values[:0] for key, values in plain.items()})


def test_shuffled_rows_are_refused(refusal, recording, last_rows):
    n = (20, 20)
    arrays = recording(n) | {"timeouts": last_rows(n)}
    order = np.random.default_rng(0).permutation(40)
    assert "shuffled" in refusal({k: v[order] for k, v in arrays.items()}, timeouts="ignore")


def test_values_that_were_never_written_are_refused(plain, tmp_path):
    path = tmp_path / "stopped.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in plain.items():
            file.create_dataset(key, values.shape, values.dtype, chunks=(5, *values.shape[1:]))[:10] = values[:10]
    with pytest.raises(DatasetError, match=r"stopped\.hdf5: 'observations' .* only 2 of 3 chunks"):
        D4RL().open(path)


def test_an_unknown_filter_is_named(plain, tmp_path):
    path = tmp_path / "packed.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in plain.items():
            if key != "actions":
                file[key] = values
        actions = plain["actions"]
        packed = file.create_dataset(
            "actions", actions.shape, actions.dtype, chunks=actions.shape, compression=300, allow_unknown_filter=True
        )
        packed.id.write_direct_chunk((0, 0), actions.tobytes(), 0)
    with pytest.raises(DatasetError, match=r"packed\.hdf5: 'actions' is packed with filter 300"):
        D4RL().open(path)


def test_damage_inside_a_packed_array_names_file_and_key(plain, tmp_path):
    path = tmp_path / "damaged.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in plain.items():
            file.create_dataset(key, data=values, compression="gzip")
        offset = file["actions"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 5] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"damaged\.hdf5: 'actions' cannot be read"), D4RL().open(path) as source:
        list(source.blocks())


# ---------------------------------------------------------------- recognition


def test_a_boolean_that_is_neither_true_nor_false_is_refused(read, plain, write_hdf5):
    path = write_hdf5("file.hdf5", **plain)
    with h5py.File(path) as file:
        start = file["timeouts"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[start + 2] = 64
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"^file\.hdf5: 'timeouts' is 64 at row 2: flags are 0 or 1"):
        read(path)


def test_a_key_that_is_no_text_is_shown_as_bytes(read, plain, write_hdf5):
    path = write_hdf5("file.hdf5", **plain)
    path.write_bytes(path.read_bytes().replace(b"actions\0", b"act\xff\xfens\0"))
    with pytest.raises(DatasetError, match=r"^file\.hdf5: 'actions' is missing; keys present: .*act\\xff\\xfens"):
        read(path)


def test_metadata_that_is_no_text_is_marked(read, plain, write_hdf5, tmp_path):
    path = write_hdf5("file.hdf5", {"maker": "somebody"}, **plain)
    path.write_bytes(path.read_bytes().replace(b"somebody", b"some\xff\xfedy").replace(b"maker\0", b"mak\xffr\0"))
    ingest(path, "toy", Store(tmp_path / "store"))
    provenance = Store(tmp_path / "store").dataset("toy").manifest.provenance
    assert provenance["metadata"] == {"mak\ufffdr": "some\ufffd\ufffddy"}


def test_content_decides_the_format(write_hdf5, plain):
    path = write_hdf5("recording.bin", **plain)
    assert recognise(path) == D4RL()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"<html><head><title>404</title></head></html>", "looks like a web page"),
        (b"\n  <!DOCTYPE html>\n<html></html>", "looks like a web page"),
        (b"GIF89a", "no known format"),
    ],
)
def test_what_is_no_dataset_is_said_in_its_own_words(tmp_path, content, message):
    path = tmp_path / "file.hdf5"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"file\.hdf5: .*{message}"):
        recognise(path)


def test_a_file_cut_short_is_said_to_be(write_hdf5, plain):
    path = write_hdf5("cut.hdf5", **plain)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    with pytest.raises(DatasetError, match=r"cut\.hdf5: cut short"):
        recognise(path)


def test_hdf5_without_arrays_is_said_to_be(write_hdf5):
    with pytest.raises(DatasetError, match=r"without any arrays; looked for observations, actions, terminals"):
        recognise(write_hdf5("none.hdf5"))


def test_other_hdf5_is_listed(write_hdf5):
    with pytest.raises(DatasetError, match=r"an HDF5 file with a/b.*Tried: .*d4rl"):
        recognise(write_hdf5("other.hdf5", a__b=np.zeros(3)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match="there is no such file"):
        recognise(tmp_path / "none.hdf5")
