"""Labels: one finite float32 for each step, and returns that float32 sums get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from data.errors import DatasetError
from data.labels import Labels, episode_returns, label_id


def test_labels_are_one_float32_a_step():
    with pytest.raises(DatasetError, match="float64"):
        Labels(np.zeros(3))
    with pytest.raises(DatasetError, match=r"\(3, 1\)"):
        Labels(np.zeros((3, 1), np.float32))


def test_every_step_needs_one(random_trajectories):
    with pytest.raises(DatasetError, match="12 labels for 13 steps"):
        Labels(np.zeros(12, np.float32)).check(random_trajectories((5, 1, 7)))


def test_a_label_that_is_not_finite_is_named_by_episode_and_step(random_trajectories):
    rewards = np.zeros(13, np.float32)
    rewards[8] = np.nan
    with pytest.raises(DatasetError, match="label nan at episode 2, step 2"):
        Labels(rewards).check(random_trajectories((5, 1, 7)))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (np.full(1_000_000, 0.1, np.float32), 100000.00149),  # a float32 running sum gives 100958.344
        (np.full(1000, 100, np.float16), 100000),  # infinite in float16
        (np.tile(np.array([1e8, 1, -1e8], np.float32), 1000), 1000),  # 0 in float32
    ],
)
def test_returns_are_sums_in_float64(rewards, expected):
    assert episode_returns(rewards, np.array([0, len(rewards)])) == pytest.approx([expected], rel=1e-9)


def test_returns_are_by_episode():
    assert episode_returns(np.arange(6, dtype=np.float32), np.array([0, 1, 4, 6])).tolist() == [0, 6, 9]
    assert len(episode_returns(np.zeros(0, np.float32), np.array([0]))) == 0


def test_a_label_id_changes_with_everything_that_changes_labels():
    ids = {
        label_id("d", {"kind": "zero"}, 1, "e"),
        label_id("D", {"kind": "zero"}, 1, "e"),
        label_id("d", {"kind": "one"}, 1, "e"),
        label_id("d", {"kind": "zero"}, 2, "e"),
        label_id("d", {"kind": "zero"}, 1, "E"),
    }
    assert len(ids) == 5
