"""Trajectory returns as evidence: whose are known, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from data.errors import ConfigurationError
from data.trajectories import Trajectories
from labelers.evidence import TrajectoryReturns

Make = Callable[..., Trajectories]


class Rewards:
    """A dataset and its rewards."""

    def __init__(self, data: Trajectories, rewards: np.ndarray) -> None:
        self._data, self._rewards = data, rewards

    def trajectories(self, name: str) -> Trajectories:
        assert name == "self"
        return self._data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        assert (name, labels) == ("self", "source")
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        return None


def returns(spec: TrajectoryReturns, source: Rewards) -> np.ndarray:
    evidence = spec.resolve(source)
    assert evidence.rewards is None
    assert evidence.returns is not None and evidence.returns.dtype == np.float64
    return evidence.returns


def test_returns_are_sums_of_rewards(random_trajectories: Make) -> None:
    source = Rewards(random_trajectories((2, 1, 3)), np.array([1, 2, 30, 4, 5, 1e4], np.float32))
    assert returns(TrajectoryReturns(), source).tolist() == [3, 30, 10009]


def test_a_fraction_of_the_episodes_is_known_the_smaller_inside_the_larger(random_trajectories: Make) -> None:
    source = Rewards(random_trajectories((3,) * 20), np.ones(60, np.float32))
    known = [set(np.flatnonzero(returns(TrajectoryReturns(fraction=f), source) == 3)) for f in (0.1, 0.25, 1)]
    assert [len(k) for k in known] == [2, 5, 20]
    assert known[0] < known[1] < known[2]
    assert np.isnan(returns(TrajectoryReturns(fraction=0.25), source)).sum() == 15
    assert set(np.flatnonzero(returns(TrajectoryReturns(fraction=0.25, seed=1), source) == 3)) != known[1]


def test_who_earned_what_inside_an_episode_is_no_evidence(random_trajectories: Make) -> None:
    data = random_trajectories((4, 3, 5))
    rewards = np.arange(12, dtype=np.float32)
    swapped = rewards[[3, 2, 1, 0, 6, 4, 5, 11, 10, 9, 8, 7]]
    digests = [TrajectoryReturns().resolve(Rewards(data, r)).digest for r in (rewards, swapped, rewards[::-1].copy())]
    assert digests[0] == digests[1] != digests[2]


def test_a_fraction_that_comes_to_none_is_refused(random_trajectories: Make) -> None:
    source = Rewards(random_trajectories((3, 3)), np.ones(6, np.float32))
    with pytest.raises(ConfigurationError, match=r"fraction: 0\.2 of 2 episodes is none: 0\.5 would be one"):
        TrajectoryReturns(fraction=0.2).resolve(source)


def test_the_label_set_is_named_before_any_work() -> None:
    (reference,) = TrajectoryReturns(labels="reward_model").references("returns")
    assert (reference.dataset, reference.labels, reference.place) == ("self", "reward_model", ("returns", "labels"))
