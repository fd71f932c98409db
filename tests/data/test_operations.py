"""Merging, splitting and filtering: which episodes are taken, whose rewards go along, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.errors import ConfigurationError, DatasetError
from data.labels import Labels, label_id
from data.operations import Criteria, Parent, filter_episodes, merge, split
from data.readers.reader import Block
from data.store import Store, StoredDataset
from data.trajectories import Trajectories, concatenate

Make = Callable[..., Trajectories]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def parent(store: Store, name: str, data: Trajectories, rewards: np.ndarray | None = None) -> Parent:
    stored = store.write_dataset(name, [Block(data, None)], None, shard_bytes=150)  # several shards
    if rewards is None:
        return Parent(stored, None)
    identity = label_id(stored.digest, {"kind": "source"}, 1, name)
    origin = {"labeler": {"kind": "source"}, "evidence": None}
    made = store.write_labels(stored, identity, lambda i, shard, steps: Labels(rewards[steps]), origin)
    return Parent(stored, made)


def rewards_of(data: Trajectories, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=data.n_steps).astype(np.float32)


def stored_rewards(store: Store, dataset: StoredDataset) -> np.ndarray:
    return np.asarray(store.find_labels(dataset, "source").rewards)


def lineage(dataset: StoredDataset) -> dict[str, object]:
    assert isinstance(dataset.manifest.provenance, dict)
    return dict(dataset.manifest.provenance)


def test_merged_episodes_and_rewards_follow_each_other(store: Store, random_trajectories: Make) -> None:
    a, b = random_trajectories((3, 1, 4)), random_trajectories((2, 5), seed=1)
    parents = [parent(store, "a", a, rewards_of(a)), parent(store, "b", b, rewards_of(b, 1))]
    derived = merge(store, "both", parents)
    found = store.dataset("both")
    assert found.digest == derived.dataset == concatenate([a, b]).digest()
    assert stored_rewards(store, found).tobytes() == np.concatenate([rewards_of(a), rewards_of(b, 1)]).tobytes()
    said = lineage(found)
    assert said["operation"] == "merge"
    assert [p["name"] for p in said["parents"]] == ["a", "b"]  # type: ignore[index, attr-defined]


def test_rewards_of_some_parents_do_not_go_along_and_that_is_said(store: Store, random_trajectories: Make) -> None:
    a, b = random_trajectories((3,)), random_trajectories((2,), seed=1)
    derived = merge(store, "both", [parent(store, "a", a, rewards_of(a)), parent(store, "b", b)])
    assert derived.source_labels is None
    assert [f.code for f in derived.findings] == ["source-not-carried"]
    assert "b has none" in derived.findings[0].message


def test_unlike_datasets_are_not_merged(store: Store, random_trajectories: Make) -> None:
    a, b = parent(store, "a", random_trajectories()), parent(store, "b", random_trajectories(width=4))
    with pytest.raises(DatasetError, match="'a' and 'b' differ in observation"):
        merge(store, "both", [a, b])
    with pytest.raises(ConfigurationError, match="two datasets or more"):
        merge(store, "one", [a])
    assert {d.name for d in store.datasets()} == {"a", "b"}


def test_a_split_deals_out_every_episode_once_the_same_each_time(store: Store, random_trajectories: Make) -> None:
    data = random_trajectories(tuple(range(1, 11)))
    rewards = rewards_of(data)
    whole = parent(store, "whole", data, rewards)
    derived = split(store, {"train": 0.7, "test": 0.3}, whole, seed=3)
    train, test = (store.dataset(name) for name in ("train", "test"))
    assert (train.manifest.n_episodes, test.manifest.n_episodes) == (7, 3)
    lengths = [*train.trajectories().lengths, *test.trajectories().lengths]
    assert sorted(lengths) == list(range(1, 11))
    for part in (train, test):
        episodes = part.trajectories().lengths - 1  # episode e has e + 1 steps
        assert (np.diff(episodes) > 0).all()
        assert part.digest == data.select(episodes).digest()
        steps = np.isin(data.episode_index, episodes)
        assert stored_rewards(store, part).tobytes() == rewards[steps].tobytes()
    again = split(store, {"a": 0.7, "b": 0.3}, whole, seed=3)
    assert [d.dataset for d in again] == [d.dataset for d in derived]
    assert [d.dataset for d in split(store, {"c": 0.7, "d": 0.3}, whole, seed=4)] != [d.dataset for d in derived]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"a": 0.5, "b": 0.4}, "they sum to 0.9"),
        ({"a": 1.0}, "two fractions or more"),
        ({"a": 0.99, "b": 0.01}, "'b' would have no episodes"),
    ],
)
def test_a_split_that_leaves_a_part_empty_is_refused(
    store: Store, random_trajectories: Make, parts: dict[str, float], said: str
) -> None:
    whole = parent(store, "whole", random_trajectories())
    with pytest.raises(ConfigurationError, match=said):
        split(store, parts, whole, seed=0)
    assert [d.name for d in store.datasets()] == ["whole"]


def test_one_episode_cannot_be_split(store: Store, random_trajectories: Make) -> None:
    whole = parent(store, "whole", random_trajectories((5,)))
    with pytest.raises(ConfigurationError, match="would have no episodes"):
        split(store, {"a": 0.5, "b": 0.5}, whole, seed=0)


@pytest.mark.parametrize(
    ("criteria", "episodes"),
    [
        (Criteria(shortest=3), [0, 2, 3]),
        (Criteria(longest=2), [1]),
        (Criteria(shortest=2, longest=3), [0, 1]),
        (Criteria(lowest=6.0), [0, 2, 3]),
        (Criteria(highest=6.0), [0, 1]),
        (Criteria(top=2), [2, 3]),
        (Criteria(top=1, longest=3), [0]),
    ],
    ids=str,
)
def test_a_filter_keeps_the_episodes_that_pass_in_their_order(
    store: Store, random_trajectories: Make, criteria: Criteria, episodes: list[int]
) -> None:
    data = random_trajectories((3, 2, 4, 5))
    rewards = np.full(data.n_steps, 2, np.float32)  # returns 6, 4, 8, 10
    whole = parent(store, "whole", data, rewards)
    filter_episodes(store, "kept", whole, criteria, by=whole.rewards)
    kept = store.dataset("kept")
    assert kept.digest == data.select(episodes).digest()
    assert lineage(kept)["operation"] == "filter"
    assert lineage(kept)["parents"][0]["episodes"] == episodes  # type: ignore[index]


def test_a_filter_that_keeps_too_little_or_says_nothing_is_refused(store: Store, random_trajectories: Make) -> None:
    data = random_trajectories((3, 2))
    whole = parent(store, "whole", data, rewards_of(data))
    with pytest.raises(DatasetError, match=r"0 of 2 episodes .* shortest 4"):
        filter_episodes(store, "kept", whole, Criteria(shortest=4))
    with pytest.raises(DatasetError, match=r"2 of 2 episodes .*: 3 are needed"):
        filter_episodes(store, "kept", whole, Criteria(top=3), by=whole.rewards)
    with pytest.raises(ConfigurationError, match="no condition is set"):
        filter_episodes(store, "kept", whole, Criteria())
    with pytest.raises(ConfigurationError, match="needs a label set"):
        filter_episodes(store, "kept", whole, Criteria(top=1))
    assert [d.name for d in store.datasets()] == ["whole"]


def test_returns_are_those_of_the_label_set_named_and_the_rewards_that_go_along_the_dataset_s_own(
    store: Store, random_trajectories: Make
) -> None:
    data = random_trajectories((3, 2, 4))
    own = np.zeros(9, np.float32)
    whole = parent(store, "whole", data, own)
    origin = {"labeler": {"kind": "counting"}}
    ones = np.ones(9, np.float32)  # returns 3, 2, 4
    counting = store.write_labels(whole.dataset, "1" * 64, lambda i, shard, steps: Labels(ones[steps]), origin)
    filter_episodes(store, "longest", whole, Criteria(top=2), by=counting)
    longest = store.dataset("longest")
    assert lineage(longest)["settings"] == {"top": 2, "by": counting.id, "labeler": "counting"}
    assert longest.digest == data.select([0, 2]).digest()
    assert stored_rewards(store, longest).tolist() == [0.0] * 7


def test_of_equal_returns_the_earlier_is_kept(store: Store, random_trajectories: Make) -> None:
    whole = parent(store, "whole", random_trajectories((2, 2, 2)), np.ones(6, np.float32))
    filter_episodes(store, "two", whole, Criteria(top=2), whole.rewards)
    assert lineage(store.dataset("two"))["parents"][0]["episodes"] == [0, 1]  # type: ignore[index]


def test_asked_again_nothing_new_is_stored(store: Store, random_trajectories: Make) -> None:
    whole = parent(store, "whole", random_trajectories(), np.arange(13, dtype=np.float32))
    first = filter_episodes(store, "best", whole, Criteria(top=2), whole.rewards)
    kept = {path: path.stat().st_mtime_ns for path in store.root.glob("*/*/*/*")}
    assert filter_episodes(store, "best", whole, Criteria(top=2), whole.rewards) == first
    assert {path: path.stat().st_mtime_ns for path in store.root.glob("*/*/*/*")} == kept
