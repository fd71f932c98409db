"""Trajectories: no next observation crosses an episode, and what does not fit together is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DatasetError
from data.trajectories import Sharded, Trajectories, concatenate


def test_next_observation_never_crosses_an_episode(random_trajectories):
    data = random_trajectories((2, 1, 3))
    # Rows 0 1 2 | 3 4 | 5 6 7 8 belong to the episodes; the last of each follows its last step.
    steps = np.arange(6)
    assert data.observation_rows(steps).tolist() == [0, 1, 3, 5, 6, 7]
    np.testing.assert_array_equal(data.step_observations, data.observations[[0, 1, 3, 5, 6, 7]])


def test_a_truncated_end_without_an_observation_is_no_transition(random_trajectories):
    data = replace(random_trajectories((2, 2, 2)), final_observed=np.array([False, False, True]))
    # Episodes 0 and 2 terminate, episode 1 is truncated: only its last step has nothing to bootstrap from.
    assert data.transition_index.tolist() == [0, 1, 2, 4, 5]
    assert data.continues.tolist() == [True, False, True, True, True, False]


def test_selected_episodes_keep_their_columns(random_trajectories):
    data = random_trajectories((2, 1, 3))
    chosen = data.select([2, 0])
    assert chosen.lengths.tolist() == [3, 2]
    np.testing.assert_array_equal(chosen.actions, np.concatenate([data.actions[3:], data.actions[:2]]))
    np.testing.assert_array_equal(chosen.observations, np.concatenate([data.observations[5:], data.observations[:3]]))
    with pytest.raises(DatasetError, match="episode 3 does not exist"):
        data.select([3])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_any_cut_and_join_gives_the_same_digest(lengths, data):
    rng = np.random.default_rng(0)
    n, e = sum(lengths), len(lengths)
    whole = Trajectories(
        observations=rng.normal(size=(n + e, 2)).astype(np.float32),
        actions=rng.normal(size=(n, 1)).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=rng.random(e) < 0.5,
        truncated=np.ones(e, bool),
        final_observed=rng.random(e) < 0.5,
    )
    cut = data.draw(st.integers(0, e - 1))
    parts = [whole.select(range(cut)), whole.select(range(cut, e))] if cut else [whole]
    assert concatenate(parts).digest() == whole.digest()


@pytest.mark.parametrize("name", ["observations", "actions", "terminated", "truncated", "final_observed"])
def test_the_digest_sees_every_column(random_trajectories, name):
    data = random_trajectories((3, 2))
    changed = np.array(getattr(data, name))
    changed[-1] = ~changed[-1] if changed.dtype == bool else changed[-1] + 1
    if name in ("terminated", "truncated"):
        changed = np.ones(2, bool)
    assert replace(data, **{name: changed}).digest() != data.digest()


def test_the_digest_sees_what_actions_mean(random_trajectories):
    data = random_trajectories((3, 2), n_actions=(4,))
    assert replace(data, n_actions=(5,)).digest() != data.digest()
    bounded = random_trajectories((3, 2))
    assert replace(bounded, action_bounds=None).digest() != bounded.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array([0, 3, 3, 5])}, "rise by at least one step"),
        ({"offsets": np.array([1, 5])}, "must start at 0"),
        ({"actions": np.zeros((4, 2), np.float32)}, "4 actions for 5 steps"),
        ({"observations": np.zeros((6, 3), np.float32)}, "expected 7, one more than steps in each episode"),
        ({"terminated": np.zeros(3, bool)}, "'terminated'"),
        ({"truncated": np.zeros(2, bool)}, "episode 1 is neither terminated nor truncated"),
        ({"n_actions": (3, 3)}, "discrete actions are integers"),
    ],
)
def test_columns_that_do_not_fit_are_refused(random_trajectories, change, message):
    with pytest.raises(DatasetError, match=message):
        replace(random_trajectories((3, 2)), **change)


def test_datasets_of_different_kinds_are_not_joined(random_trajectories):
    with pytest.raises(DatasetError, match="observations"):
        concatenate([random_trajectories(width=3), random_trajectories(width=4)])
    with pytest.raises(DatasetError, match="differ in kind"):
        concatenate([random_trajectories(n_actions=(3,)), random_trajectories(n_actions=(4,))])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_a_sharded_column_is_indexed_like_an_array(sizes, data):
    whole = np.arange(2 * sum(sizes), dtype=np.float32).reshape(-1, 2)
    sharded = Sharded(np.split(whole, np.cumsum(sizes)[:-1]))
    n = len(whole)
    assert sharded.shape == whole.shape and sharded.dtype == whole.dtype and len(sharded) == n
    start, stop = data.draw(st.integers(-n, n)), data.draw(st.integers(-n, n))
    stride = data.draw(st.sampled_from([1, 2, -1]))
    rows = data.draw(st.lists(st.integers(-n, n - 1), max_size=7))
    np.testing.assert_array_equal(sharded[start:stop:stride], whole[start:stop:stride])
    np.testing.assert_array_equal(sharded[np.array(rows, int)], whole[np.array(rows, int)])
    np.testing.assert_array_equal(sharded[whole[:, 0] > 3], whole[whole[:, 0] > 3])
    np.testing.assert_array_equal(np.asarray(sharded), whole)
    with pytest.raises(IndexError):
        sharded[np.array([n])]
