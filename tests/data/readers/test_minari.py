"""Minari datasets, as the real package writes them and reads them back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gymnasium
import h5py
import minari
import numpy as np
import pyarrow as pa
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Text
from minari.data_collector import EpisodeBuffer

from data.errors import DatasetError
from data.ingest import ingest
from data.labels import episode_returns
from data.readers import recognise
from data.readers.minari import Minari
from data.readers.reader import RefusedError
from data.store import Store
from tests.data.readers.reading import read_path
from tests.data.readers.samples import recording, write_minari_arrow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")  # it asks for an environment

LENGTHS = (4, 2, 3)
THREE = Discrete(3)
VECTOR = Box(-np.inf, np.inf, (2,), np.float64)
GOALS = gymnasium.spaces.Dict(
    {"observation": Box(-9, 9, (3,), np.float32), "desired_goal": VECTOR, "achieved_goal": VECTOR}
)


def sampled(space: gymnasium.Space, n: int) -> object:
    """n samples of a space, as Minari wants them: one array a leaf."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: sampled(part, n) for key, part in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(sampled(part, n) for part in space)
    values = [space.sample() for _ in range(n)]
    return values if isinstance(space, Text) else np.stack(values)


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a dataset with Minari: `create(observation_space, action_space, rewards)`, and gives its folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def write(
        observation: gymnasium.Space = VECTOR,
        action: gymnasium.Space = THREE,
        rewards: float | None = None,
        data_format: str = "hdf5",
        **settings: object,
    ) -> Path:
        observation.seed(0)
        action.seed(1)
        rng = np.random.default_rng(0)
        buffers = [
            EpisodeBuffer(
                observations=sampled(observation, n + 1),
                actions=sampled(action, n),
                rewards=list(rng.normal(size=n) if rewards is None else np.full(n, rewards)),
                terminations=[e == 0 and t == n - 1 for t in range(n)],
                truncations=[e == 1 and t == n - 1 for t in range(n)],
            )
            for e, n in enumerate(LENGTHS)
        ]
        minari.create_dataset_from_buffers(
            "toy/recording-v0",
            buffers,
            observation_space=observation,
            action_space=action,
            data_format=data_format,
            algorithm_name="random",
            author="a",
            author_email="a@example.org",
            code_permalink="https://example.org",
            description="toy",
            **settings,
        )
        return tmp_path / "minari" / "toy" / "recording-v0"

    return write


@pytest.fixture(params=["hdf5", "arrow", "parquet"])
def data_format(request: pytest.FixtureRequest) -> str:
    return request.param


def test_minari_reads_the_same_back(create, data_format):
    path = create(VECTOR, Box(-1, 1, (3,), np.float32), data_format=data_format)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    got = read_path(recognise(path), path)
    data = got.trajectories
    assert data.lengths.tolist() == list(LENGTHS)
    assert data.terminated.tolist() == [True, False, False] and data.truncated.tolist() == [False, True, True]
    assert data.final_observed.all() and data.action_bounds == (-1, 1)
    np.testing.assert_array_equal(
        data.observations, np.concatenate([e.observations for e in episodes]).astype(np.float32)
    )
    np.testing.assert_array_equal(data.actions, np.concatenate([e.actions for e in episodes]))
    np.testing.assert_array_equal(got.rewards, np.concatenate([e.rewards for e in episodes]).astype(np.float32))
    assert "episode_2" in got.finding("unfinished-episodes").message
    assert got.source.metadata["algorithm_name"] == "random" and got.source.metadata["author"] == ["a"]
    assert got.source.observation.dtype == "float64" and got.source.n_steps == sum(LENGTHS)


def test_the_dataset_is_found_from_any_of_its_folders(create):
    path = create()
    digests = {
        read_path(Minari(), p).trajectories.digest() for p in (path, path / "data", path.parent, path.parents[1])
    }
    assert len(digests) == 1
    shutil.copytree(path, path.parent / "second-v0")
    with pytest.raises(RefusedError, match=r"2 Minari datasets here \(recording-v0, second-v0\): give one"):
        Minari().open(path.parent)


def test_the_hdf5_file_alone_says_what_it_lacks(create):
    path = create() / "data" / "main_data.hdf5"
    assert recognise(path) == Minari()
    got = read_path(Minari(), path)
    assert got.trajectories.lengths.tolist() == list(LENGTHS)
    assert {"no-metadata", "n-actions-taken"} <= got.codes
    assert (
        read_path(Minari(n_actions=3), path).trajectories.digest()
        == read_path(Minari(), path.parent).trajectories.digest()
    )


def test_what_older_versions_wrote_into_the_hdf5_file_is_used(create):
    path = create() / "data"
    with h5py.File(path / "main_data.hdf5", "a") as file:
        file.attrs.update(json.loads((path / "metadata.json").read_text()))
    whole = read_path(Minari(), path)
    (path / "metadata.json").unlink()
    got = read_path(Minari(), path)
    assert got.trajectories.digest() == whole.trajectories.digest() and "no-metadata" not in got.codes


# ---------------------------------------------------------------- observations


def test_dict_observations_are_joined_in_alphabetic_order_and_said(create, data_format):
    path = create(GOALS, data_format=data_format)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    got = read_path(Minari(), path)
    assert list(got.source.observation) == ["achieved_goal", "desired_goal", "observation"]
    assert got.source.observation["desired_goal"].dtype == "float64"
    found = got.finding("observation-keys").message
    assert "achieved_goal (2,), desired_goal (2,), observation (3,), in this order" in found
    joined = [np.concatenate([e.observations[key] for key in sorted(e.observations)], 1) for e in episodes]
    np.testing.assert_array_equal(got.trajectories.observations, np.concatenate(joined).astype(np.float32))


def test_observation_keys_are_chosen_and_ordered(create):
    path = create(GOALS)
    whole = read_path(Minari(), path).trajectories.observations
    got = read_path(Minari(observation_keys=("observation", "desired_goal")), path)
    np.testing.assert_array_equal(got.trajectories.observations, whole[:, [4, 5, 6, 2, 3]])
    assert "Not read: achieved_goal" in got.finding("observation-keys").message
    alone = read_path(Minari(observation_keys=("desired_goal",)), path)
    np.testing.assert_array_equal(alone.trajectories.observations, whole[:, 2:4])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("goal",), "'goal' is not among the observations; keys present: achieved_goal, desired_goal, observation"),
        (("observation", "observation"), "a key is given twice"),
    ],
)
def test_keys_that_cannot_be_chosen_are_refused(create, keys, message):
    with pytest.raises(RefusedError, match=f"recording-v0: observation_keys: {message}"):
        Minari(observation_keys=keys).open(create(GOALS))


def test_keys_for_a_single_array_are_refused(create):
    with pytest.raises(RefusedError, match="single array without keys"):
        Minari(observation_keys=("observation",)).open(create())


def test_nested_and_tuple_observations_have_dotted_names(create, data_format):
    arm = gymnasium.spaces.Dict({"position": Box(-1, 1, (2,), np.float32), "gripper": Discrete(2)})
    path = create(gymnasium.spaces.Tuple((arm, Box(-1, 1, (1,), np.float32), MultiBinary(2))), data_format=data_format)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    got = read_path(Minari(), path)
    assert list(got.source.observation) == ["0.gripper", "0.position", "1", "2"]
    joined = [
        np.concatenate([arm["gripper"][:, None], arm["position"], one, two], 1)
        for arm, one, two in (e.observations for e in episodes)
    ]
    np.testing.assert_array_equal(got.trajectories.observations, np.concatenate(joined).astype(np.float32))


def test_images_stay_bytes_whether_packed_or_not(create, data_format):
    packed, raw = Box(0, 255, (40, 32, 3), np.uint8), Box(0, 255, (4, 4, 3), np.uint8)
    path = create(gymnasium.spaces.Dict({"camera": packed, "map": raw}), data_format=data_format)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    for key in ("camera", "map"):
        got = read_path(Minari(observation_keys=(key,)), path).trajectories.observations
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, np.concatenate([e.observations[key] for e in episodes]))
    with pytest.raises(RefusedError, match=r"'camera' of shape \(40, 32, 3\) cannot be joined"):
        Minari().open(path)


def test_large_images_without_compression_are_read_too(create):
    path = create(Box(0, 255, (40, 32, 3), np.uint8), jpeg_encoding=False)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    got = read_path(Minari(), path)
    np.testing.assert_array_equal(got.trajectories.observations, np.concatenate([e.observations for e in episodes]))
    assert "observation_space" not in got.source.metadata
    assert "not kept as metadata" in got.finding("metadata-left-out").message


def test_text_is_refused_unless_other_keys_are_chosen(create):
    path = create(gymnasium.spaces.Dict({"mission": Text(8), "position": VECTOR}))
    with pytest.raises(RefusedError, match="'mission' is text: expected numbers"):
        Minari().open(path)
    assert read_path(Minari(observation_keys=("position",)), path).trajectories.n_steps == 9


# ---------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("space", "n_actions", "start"),
    [
        (Discrete(5), (5,), 0),
        (Discrete(3, start=2), (3,), 2),
        (MultiDiscrete([3, 4]), (3, 4), 0),
        (MultiDiscrete([3, 4], start=[1, -1]), (3, 4), [1, -1]),
        (MultiBinary(2), (2, 2), 0),
    ],
)
def test_discrete_actions_have_the_counts_of_their_space_from_zero(create, data_format, space, n_actions, start):
    path = create(action=space, data_format=data_format)
    episodes = list(minari.load_dataset("toy/recording-v0"))
    got = read_path(Minari(), path)
    assert got.trajectories.n_actions == n_actions
    np.testing.assert_array_equal(got.trajectories.actions, np.concatenate([e.actions for e in episodes]) - start)
    assert ("action-start" in got.codes) == bool(np.any(start))
    assert "n-actions-taken" not in got.codes


def test_a_box_of_integers_is_continuous_as_declared(create):
    got = read_path(Minari(), create(action=Box(-2, 2, (2,), np.int64)))
    assert got.trajectories.actions.dtype == np.float32 and got.trajectories.action_bounds == (-2, 2)
    assert "box-of-integers" in got.codes


def test_actions_of_several_kinds_are_refused(create):
    with pytest.raises(RefusedError, match="actions are a Dict space: expected Box, Discrete"):
        Minari().open(create(action=gymnasium.spaces.Dict({"a": Discrete(2)})))


# ---------------------------------------------------------------- rewards, ends, order


def test_rewards_that_are_all_nan_mean_that_there_are_none(create, data_format, tmp_path):
    path = create(rewards=np.nan, data_format=data_format)
    got = read_path(Minari(), path)
    assert got.rewards is None and "unlabelled" in got.codes and "not-finite" not in got.codes
    assert ingest(path, "toy", Store(tmp_path / "store")).source_labels is None


def test_an_episode_with_as_many_observations_as_actions_has_no_final_one(tmp_path):
    # Twelve episodes of dict observations whose first column is the episode's number and reward; the seventh lacks its
    # final observation, and HDF5 lists episode_10 before episode_2.
    lengths = [4, 6, 5, 3, 7, 4, 5, 6, 2, 8, 3, 5]
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        for e, n in enumerate(lengths):
            rows = n + (e != 7)
            file[f"episode_{e}/observations/observation"] = np.full((rows, 3), e, np.float32)
            file[f"episode_{e}/observations/desired_goal"] = np.zeros((rows, 2), np.float32)
            file[f"episode_{e}/actions"] = np.zeros((n, 2), np.float32)
            file[f"episode_{e}/rewards"] = np.full(n, float(e))
            file[f"episode_{e}/terminations"] = np.arange(n) == (n - 1 if e % 2 == 0 else n)
            file[f"episode_{e}/truncations"] = np.arange(n) == (n - 1 if e % 2 == 1 else n)
    got = read_path(Minari(), tmp_path)
    data = got.trajectories
    assert data.lengths.tolist() == lengths
    assert data.observations[data.offsets[:-1] + np.arange(12), 2].tolist() == list(range(12))
    assert episode_returns(got.rewards, data.offsets).tolist() == [n * e for e, n in enumerate(lengths)]
    assert data.terminated.tolist() == [e % 2 == 0 for e in range(12)]
    assert np.flatnonzero(~data.final_observed).tolist() == [7]
    found = got.finding("final-observation-unknown")
    assert (found.episode, found.step, found.count) == (7, 5, 1) and "episode_7" in found.message
    # Only the last step of episode 7 has no next observation: 4 + 6 + 5 + 3 + 7 + 4 + 5 + 6 - 1 = 39.
    assert sorted(set(range(58)) - set(data.transition_index.tolist())) == [39]


def test_without_the_row_after_the_last_step_arrow_has_no_final_observation(tmp_path):
    path = write_minari_arrow(tmp_path, recording())
    part = path / "data" / "3" / "part-0.arrow"
    with pa.OSFile(str(part)) as file:
        table = pa.ipc.open_file(file).read_all()
    with pa.ipc.new_file(part, table.schema) as file:
        file.write_table(table.slice(0, len(table) - 1))
    got = read_path(Minari(), path)
    assert np.flatnonzero(~got.trajectories.final_observed).tolist() == [3]
    assert "episode_3" in got.finding("final-observation-unknown").message
    with pa.ipc.new_file(part, table.schema) as file:
        file.write_table(table.slice(0, len(table) - 2))
    with pytest.raises(DatasetError, match=r"data/3/metadata\.json: total_steps is 3 and the episode has 2 rows"):
        read_path(Minari(), path)


def test_a_flag_before_the_last_step_does_not_cut(create):
    path = create()
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_0/terminations"][1] = True
    got = read_path(Minari(), path)
    assert got.trajectories.lengths.tolist() == list(LENGTHS)
    found = got.finding("flags-inside")
    assert found.severity == "warning" and found.message.endswith("1 (episode_0).")


# ---------------------------------------------------------------- files that cannot be right


def test_missing_episodes_are_refused_by_number(create, data_format):
    path = create(data_format=data_format)
    if data_format == "hdf5":
        with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
            del file["episode_1"]
    else:
        shutil.rmtree(path / "data" / "1")
    with pytest.raises(RefusedError, match="says 3 episodes and 2 are there; missing: 1"):
        Minari().open(path)


def test_gaps_in_the_numbers_of_episodes_are_said(create):
    path = create()
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file.move("episode_2", "episode_999999999999")
    got = read_path(Minari(), path)
    assert got.trajectories.lengths.tolist() == list(LENGTHS)
    found = got.finding("gaps-in-numbers")
    assert "no episode 2, 3, 4, 5, 6, ...:" in found.message and found.count == 999_999_999_997


def test_episodes_without_steps_are_left_out_and_counted(create):
    path = create()
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for key in ("actions", "rewards", "terminations", "truncations"):
            file["episode_1"][key].resize(0, axis=0)
        file["episode_1/observations"].resize(1, axis=0)
    got = read_path(Minari(), path)
    assert got.trajectories.lengths.tolist() == [4, 3] and "1 (episode_1)" in got.finding("empty-episodes").message


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("actions", np.zeros(2, np.int64), r"episode_0: 5 observations but 2 actions"),
        ("observations", np.zeros((5, 3)), r"episode_0: 'observations' has rows of float64 \(3,\); expected"),
        ("rewards", np.zeros(3), r"episode_0: 'rewards' is float64 of shape \(3,\); expected numbers of shape \(4,\)"),
        ("terminations", np.full(4, 0.5), r"episode_0: 'terminations' is 0.5 at step 0: flags are 0 or 1"),
        ("truncations", None, "'episode_0/truncations' is missing"),
    ],
)
def test_columns_that_cannot_be_right_are_refused_by_episode(create, key, values, message):
    path = create()
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file[f"episode_0/{key}"]
        if values is not None:
            file[f"episode_0/{key}"] = values
        # The first episode says what rows are: it has to come after one that is right.
        file.move("episode_0", "episode_x")
        file.copy("episode_2", "episode_0")
        file["episode_0/terminations"][-1] = True
        file.move("episode_x", "episode_3")
    with pytest.raises(DatasetError, match=message.replace("episode_0", "episode_3")):
        read_path(Minari(), path)


def test_a_space_that_cannot_be_read_is_refused_by_key(create):
    path = create()
    metadata = path / "data" / "metadata.json"
    content = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(content | {"action_space": '{"type": "Graph"}'}))
    with pytest.raises(DatasetError, match=r"recording-v0: 'action_space' is no space that can be read"):
        Minari().open(path)


def test_a_picture_that_is_none_is_refused_by_episode_and_step(create):
    path = create(Box(0, 255, (40, 32, 3), np.uint8))
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        pictures = file["episode_1/observations"]
        pictures[2] = np.zeros_like(pictures[2])
    with pytest.raises(DatasetError, match=r"episode_1: 'observations': the picture of step 2 cannot be decoded"):
        read_path(Minari(), path)
