"""What others read: files as minari itself, plain h5py, pandas and polars see them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import minari
import numpy as np
import pandas as pd
import polars as pl
import pytest

from data.errors import ConfigurationError
from data.export import export
from data.ingest import ingest
from data.labels import Labels
from data.readers import recognise
from data.readers.lerobot import LeRobot
from data.readers.reader import Block, RefusedError
from data.store import Store, StoredDataset, StoredLabels
from data.trajectories import Trajectories
from data.writers.d4rl import D4RLWriter
from data.writers.lerobot import LeRobotWriter
from data.writers.minari import MinariWriter
from data.writers.writer import Writer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def episodes(random_trajectories) -> Trajectories:
    """Episodes of 5, 1 and 7 steps: terminated; both; truncated without a final observation."""
    data = random_trajectories()
    data.observations[-1] = data.observations[-2]
    return replace(
        data,
        terminated=np.array([True, True, False]),
        truncated=np.array([False, True, True]),
        final_observed=np.array([True, True, False]),
    )


def stored(store: Store, data: Trajectories) -> tuple[StoredDataset, StoredLabels]:
    """A dataset, and labels 1, 2, ... for its steps."""
    dataset = store.write_dataset("toy", [Block(data, None)], {}, shard_bytes=100)
    rewards = np.arange(1, data.n_steps + 1, dtype=np.float32)
    origin = {"labeler": {"kind": "counting"}}
    return dataset, store.write_labels(dataset, "c" * 32, lambda i, shard, steps: Labels(rewards[steps]), origin)


def test_d4rl_is_flat_arrays_with_flags(store, episodes, tmp_path):
    dataset, labels = stored(store, episodes)
    export(dataset, tmp_path / "a.hdf5", D4RLWriter(), labels)
    with h5py.File(tmp_path / "a.hdf5") as file:
        arrays = {key: file[key][()] for key in ("observations", "actions", "rewards", "next_observations")}
        terminals, timeouts = file["terminals"][()], file["timeouts"][()]
        assert (file.attrs["action_low"], file.attrs["action_high"]) == (-1, 1)
    assert np.flatnonzero(terminals).tolist() == [4, 5] and np.flatnonzero(timeouts).tolist() == [5, 12]
    assert arrays["rewards"].tolist() == list(range(1, 14)) and {v.dtype.name for v in arrays.values()} == {"float32"}
    # Rows 0-4, 6 and 8-14 of the 16 observations are seen at steps; what follows is one row further.
    steps = np.r_[0:5, 6, 8:15]
    np.testing.assert_array_equal(arrays["observations"], episodes.observations[steps])
    np.testing.assert_array_equal(arrays["next_observations"], episodes.observations[steps + 1])
    np.testing.assert_array_equal(arrays["actions"], episodes.actions)


@pytest.mark.parametrize("n_actions", [(4,), (2, 3)])
def test_d4rl_says_how_many_actions_there_are(store, random_trajectories, tmp_path, n_actions):
    dataset, _ = stored(store, random_trajectories(n_actions=n_actions))
    export(dataset, tmp_path / "a.hdf5", D4RLWriter())
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert tuple(file.attrs["action_count"]) == n_actions and "rewards" not in file


def test_minari_loads_it_by_its_id(store, episodes, tmp_path, monkeypatch):
    dataset, labels = stored(store, episodes)
    export(dataset, tmp_path / "toy-v3", MinariWriter(), labels)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    loaded = minari.load_dataset("toy-v3")
    assert (loaded.total_episodes, loaded.total_steps, loaded.id) == (3, 13, "toy-v3")
    assert loaded.action_space.low.tolist() == [-1, -1] and loaded.observation_space.shape == (3,)
    for index, episode in enumerate(loaded.iterate_episodes()):
        own = episodes.select([index])
        n = own.n_steps + int(own.final_observed[0])
        np.testing.assert_array_equal(episode.observations, own.observations[:n])
        np.testing.assert_array_equal(episode.actions, own.actions)
        assert episode.terminations.tolist() == [False] * (own.n_steps - 1) + own.terminated.tolist()
        assert episode.truncations.tolist() == [False] * (own.n_steps - 1) + own.truncated.tolist()
    assert sum(episode.rewards.sum() for episode in loaded.iterate_episodes()) == 91


@pytest.mark.parametrize("n_actions", [(4,), (2, 3)])
def test_minari_knows_discrete_actions_and_images(store, random_trajectories, tmp_path, n_actions):
    data = random_trajectories(n_actions=n_actions)
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 33, 3)).astype(np.uint8)
    dataset, _ = stored(store, replace(data, observations=images))
    export(dataset, tmp_path / "toy-v0", MinariWriter())
    loaded = minari.MinariDataset(tmp_path / "toy-v0" / "data")
    space = loaded.action_space
    assert (space.nvec.tolist() if len(n_actions) > 1 else [space.n]) == list(n_actions)
    assert loaded.observation_space.high.max() == 255
    np.testing.assert_array_equal(loaded[2].observations, images[8:])
    np.testing.assert_array_equal(loaded[2].actions, data.actions[6:])
    assert np.isnan(loaded[0].rewards).all()


def test_a_minari_folder_without_a_version_is_refused(store, episodes, tmp_path):
    with pytest.raises(ConfigurationError, match="with a version: 'toy-v0'"):
        export(stored(store, episodes)[0], tmp_path / "toy", MinariWriter())
    assert not (tmp_path / "toy").exists()


def test_lerobot_has_one_row_a_step_and_one_entry_an_episode(store, episodes, tmp_path):
    dataset, labels = stored(store, episodes)
    export(dataset, tmp_path / "toy", LeRobotWriter(), labels)
    meta = tmp_path / "toy" / "meta"
    info = json.loads((meta / "info.json").read_text())
    rows = pl.read_parquet(tmp_path / "toy" / "data" / "*" / "*.parquet")
    assert info["total_frames"] == len(rows) == 13 and set(info["features"]) == set(rows.columns)
    np.testing.assert_array_equal(np.array(rows["action"].to_list(), np.float32), episodes.actions)
    assert rows["next.reward"].to_list() == list(range(1, 14))
    assert rows["frame_index"].to_list() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6] == rows["timestamp"].to_list()
    assert rows["next.done"].arg_true().to_list() == [4, 5, 12]
    entries = pl.read_parquet(meta / "episodes" / "*" / "*.parquet")
    assert entries["length"].to_list() == [5, 1, 7] and entries["dataset_to_index"].to_list() == [5, 6, 13]
    stats = json.loads((meta / "stats.json").read_text())
    np.testing.assert_allclose(stats["action"]["mean"], episodes.actions.mean(0, dtype=np.float64), rtol=1e-12)
    tasks = pd.read_parquet(meta / "tasks.parquet")  # as LeRobot reads it
    assert tasks.index.to_list() == ["toy"] and tasks["task_index"].to_list() == [0]


def test_lerobot_begins_a_new_file_when_one_is_full(store, random_trajectories, tmp_path, monkeypatch):
    monkeypatch.setattr("data.store.BLOCK_BYTES", 100)
    monkeypatch.setattr("data.writers.lerobot.FILE_BYTES", 300)
    monkeypatch.setattr("data.writers.lerobot.CHUNK_FILES", 2)
    dataset, labels = stored(store, random_trajectories((5, 1, 7) * 3))
    export(dataset, tmp_path / "toy", LeRobotWriter(), labels)
    files = sorted(
        str(p.relative_to(tmp_path / "toy" / "data")) for p in (tmp_path / "toy" / "data").rglob("*.parquet")
    )
    assert files[:3] == ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    assert ingest(tmp_path / "toy", "again", store).dataset == dataset.digest


def test_lerobot_episodes_changed_since_are_refused_until_the_stale_ends_are_deleted(store, episodes, tmp_path):
    dataset, _ = stored(store, episodes)
    path = tmp_path / "toy"
    export(dataset, path, LeRobotWriter())
    ends = path / "meta" / "assay.parquet"
    pl.read_parquet(ends).slice(1).write_parquet(ends)
    with pytest.raises(RefusedError, match=r"episode 0 where 'meta/assay.parquet' goes on with episode 1"):
        ingest(path, "again", store)
    ends.unlink()
    ingest(path, "again", store)
    assert store.dataset("again").trajectories().truncated.all()
    assert recognise(path) == LeRobot()


@pytest.mark.parametrize("writer", [D4RLWriter(), MinariWriter(), LeRobotWriter()], ids=lambda writer: writer.kind)
def test_float64_is_written_as_it_is(store, episodes, tmp_path, writer: Writer):
    dataset, _ = stored(store, replace(episodes, observations=episodes.observations.astype(np.float64)))
    export(dataset, tmp_path / "toy-v0", writer)
    with recognise(tmp_path / "toy-v0").open(tmp_path / "toy-v0") as source:
        space = source.observation
    (space,) = space.values() if isinstance(space, dict) else [space]
    assert (space.shape, space.dtype) == ((3,), "float64")
