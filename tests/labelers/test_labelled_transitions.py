"""Labelled transitions as evidence: how many, which, and what is not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data.errors import ConfigurationError
from data.trajectories import Trajectories
from labelers.evidence import LabelledTransitions


class Rewards:
    """A dataset of given lengths, whose step i has reward i."""

    def __init__(self, lengths: list[int]) -> None:
        n, e = sum(lengths), len(lengths)
        self._data = Trajectories(
            observations=np.zeros((n + e, 1), np.float32),
            actions=np.zeros((n, 1), np.float32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            terminated=np.ones(e, bool),
            truncated=np.zeros(e, bool),
            final_observed=np.ones(e, bool),
        )

    def trajectories(self, name: str) -> Trajectories:
        assert name == "self"
        return self._data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        assert (name, labels) == ("self", "source")
        return np.arange(self._data.n_steps, dtype=np.float32)

    def demonstrations_of_dataset(self) -> str | None:
        return None


def known(spec: LabelledTransitions, lengths: list[int]) -> np.ndarray:
    rewards = spec.resolve(Rewards(lengths)).rewards
    assert rewards is not None and rewards.dtype == np.float32
    where = np.flatnonzero(~np.isnan(rewards))
    assert (rewards[where] == where).all()
    return where


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.05, 5), (0.1, 10), (0.105, 11), (0.104, 10), (1, 100)])
def test_the_number_of_known_steps_is_exact(fraction: float, count: int) -> None:
    assert len(known(LabelledTransitions(fraction=fraction), [60, 40])) == count


def test_whole_episodes_are_known_or_not() -> None:
    lengths = [5, 1, 9, 3, 7, 2, 8, 4]
    where = known(LabelledTransitions(fraction=0.25, per="episode"), lengths)
    episode = np.repeat(np.arange(8), lengths)
    assert len(np.unique(episode[where])) == 2
    assert len(where) == sum(np.array(lengths)[np.unique(episode[where])])


@given(st.integers(0, 1000), st.floats(0.1, 1), st.floats(0.1, 1), st.sampled_from(["step", "episode"]))
def test_a_larger_fraction_contains_a_smaller_one(seed: int, first: float, second: float, per: str) -> None:
    small, large = sorted([first, second])
    lengths = [3, 4, 5, 6, 7, 8, 9, 10]
    chosen = [
        set(known(LabelledTransitions.model_validate({"fraction": f, "per": per, "seed": seed}), lengths))
        for f in (small, large)
    ]
    assert chosen[0] <= chosen[1]


def test_the_draw_depends_on_the_seed_and_on_nothing_else() -> None:
    def drawn(seed: int) -> list[int]:
        return known(LabelledTransitions(fraction=0.2, seed=seed), [50]).tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_evidence_is_identified_by_what_is_known() -> None:
    source = Rewards([50, 50])
    digests = {
        LabelledTransitions(fraction=f, seed=s).resolve(source).digest for f, s in [(0.1, 0), (0.2, 0), (0.1, 1)]
    }
    assert len(digests) == 3
    # 0.1 and 0.102 of 100 steps are the same ten
    same = {LabelledTransitions(fraction=f).resolve(source).digest for f in (0.1, 0.102)}
    assert len(same) == 1


def test_a_fraction_that_comes_to_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"fraction: 0\.01 of 3 episodes is none: 0\.33 would be one"):
        LabelledTransitions(fraction=0.01, per="episode").resolve(Rewards([5, 5, 5]))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValidationError):
        LabelledTransitions(fraction=fraction)


def test_the_label_set_is_named_before_any_work() -> None:
    (reference,) = LabelledTransitions(labels="transport").references("rewards")
    assert (reference.dataset, reference.labels, reference.place) == ("self", "transport", ("rewards", "labels"))
