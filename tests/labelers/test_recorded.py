"""`recorded`: rewards of a file, joined to the steps of the data they were made for and to no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from data.errors import DatasetError
from data.labels import episode_returns
from data.trajectories import Trajectories
from labelers.recorded import RewardFile, write_reward_file

LENGTHS = (6, 5, 7)


class Lookup:
    def __init__(self, data: Trajectories) -> None:
        self._data = data

    def trajectories(self, name: str) -> Trajectories:
        assert name == "self"
        return self._data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        raise AssertionError("nothing else is looked up")

    def demonstrations_of_dataset(self) -> str | None:
        return None


@pytest.fixture
def data(random_trajectories: Callable[..., Trajectories]) -> Trajectories:
    return random_trajectories(LENGTHS)


def table() -> pl.DataFrame:
    """Reward 100 e + t at step t of episode e, rows shuffled."""
    rows = [(e, t, 100.0 * e + t) for e, n in enumerate(LENGTHS) for t in range(n)]
    return pl.DataFrame(rows, schema=["episode", "step", "reward"], orient="row").sample(
        fraction=1, shuffle=True, seed=3
    )


def joined(file: RewardFile, data: Trajectories) -> np.ndarray:
    found = file.resolve(Lookup(data)).rewards
    assert found is not None and found.dtype == np.float32
    return found


@pytest.mark.parametrize("name", ["rewards.parquet", "rewards.csv"])
def test_rewards_are_joined_by_episode_and_step(tmp_path: Path, data: Trajectories, name: str) -> None:
    path = tmp_path / name
    table().write_parquet(path) if name.endswith("parquet") else table().write_csv(path)
    rewards = joined(RewardFile(path=path, made_for=data.digest()), data)
    assert episode_returns(rewards, data.offsets).tolist() == [15, 510, 1421]
    assert rewards[6:11].tolist() == [100, 101, 102, 103, 104]


def test_what_is_written_is_read_back_and_names_its_dataset(tmp_path: Path, data: Trajectories) -> None:
    rewards = np.random.default_rng(0).normal(size=data.n_steps).astype(np.float32)
    write_reward_file(tmp_path / "rewards.parquet", rewards, data)
    assert joined(RewardFile(path=tmp_path / "rewards.parquet"), data).tobytes() == rewards.tobytes()
    with pytest.raises(FileExistsError):
        write_reward_file(tmp_path / "rewards.parquet", rewards, data)


def test_identity_is_of_the_content(tmp_path: Path, data: Trajectories) -> None:
    rewards = np.arange(data.n_steps, dtype=np.float32)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_reward_file(tmp_path / folder / "rewards.parquet", rewards, data)
    one, other = (RewardFile(path=Path("rewards.parquet")).beside(tmp_path / folder) for folder in ("a", "b"))
    assert one.identity() == other.identity()
    assert one.resolve(Lookup(data)).digest == other.resolve(Lookup(data)).digest


@pytest.mark.parametrize("other", ["another order", "one edited action"])
def test_other_data_is_refused_with_both_identities(tmp_path: Path, data: Trajectories, other: str) -> None:
    write_reward_file(tmp_path / "rewards.parquet", np.zeros(data.n_steps, np.float32), data)
    if other == "another order":
        changed = data.select([2, 0, 1])
    else:
        actions = np.array(data.actions)
        actions[8] += 0.001
        changed = replace(data, actions=actions)
    with pytest.raises(DatasetError) as caught:
        joined(RewardFile(path=tmp_path / "rewards.parquet"), changed)
    assert data.digest() in str(caught.value) and changed.digest() in str(caught.value)


def test_a_file_that_does_not_say_what_it_was_made_for_asks(tmp_path: Path, data: Trajectories) -> None:
    table().write_parquet(tmp_path / "rewards.parquet")
    with pytest.raises(DatasetError, match=f"say `made_for: {data.digest()}`"):
        joined(RewardFile(path=tmp_path / "rewards.parquet"), data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.filter(~((pl.col("episode") == 1) & (pl.col("step") == 3))), "episode 1, step 3 has no reward"),
        (lambda t: pl.concat([t, t.filter((pl.col("episode") == 2) & (pl.col("step") == 0))]), "step 0 has several"),
        (lambda t: t.with_columns(pl.col("episode") + 1), "episode 3, step .*: the dataset has no such step"),
        (lambda t: t.with_columns(pl.lit(float("nan")).alias("reward")), "the reward of .* is nan"),
        (lambda t: t.rename({"step": "t"}), "no column 'step'; it has"),
        (lambda t: t.with_columns(pl.col("step").cast(pl.Float64)), "'step' is Float64"),
    ],
    ids=["missing", "twice", "beyond", "nan", "column", "dtype"],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, data: Trajectories, change: Callable[[pl.DataFrame], pl.DataFrame], said: str
) -> None:
    change(table()).write_parquet(tmp_path / "rewards.parquet")
    with pytest.raises(DatasetError, match=rf"rewards\.parquet: .*{said}"):
        joined(RewardFile(path=tmp_path / "rewards.parquet", made_for=data.digest()), data)


def test_a_cut_file_is_refused_by_name(tmp_path: Path, data: Trajectories) -> None:
    path = tmp_path / "rewards.parquet"
    table().write_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DatasetError, match=r"rewards\.parquet: not a whole table"):
        joined(RewardFile(path=path, made_for=data.digest()), data)
