"""Label quality: worked values, invariances, and what is not defined."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data.errors import DatasetError
from data.trajectories import Trajectories
from labelers.quality import Quality, RewardFunction, correlation, epic_distance, plot, quality


def episodes(
    observations: np.ndarray, actions: np.ndarray, lengths: list[int], terminated: bool = False
) -> Trajectories:
    """observations: [N + E, d], actions: [N, ...]."""
    n = len(lengths)
    return Trajectories(
        observations=observations.astype(np.float32),
        actions=actions,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=np.full(n, terminated),
        truncated=np.full(n, not terminated),
        final_observed=np.ones(n, bool),
    )


def walks(seed: int, lengths: list[int], width: int = 3, terminated: bool = True) -> Trajectories:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    steps = rng.normal(size=(n + len(lengths), width)).cumsum(0) * 0.1
    return episodes(steps, rng.normal(size=(n, 2)).astype(np.float32), lengths, terminated)


def in_one_state(actions: list[int]) -> Trajectories:
    """One long recording of a bandit."""
    return episodes(np.zeros((len(actions) + 1, 1)), np.array(actions, np.float32)[:, None], [len(actions)])


def test_returns_correlate_by_the_worked_values() -> None:
    found = correlation(np.array([10.0, 20, 30, 40]), np.array([1.0, 3, 2, 5]))
    assert found.spearman == pytest.approx(0.8)
    assert found.pearson == pytest.approx(0.83152184)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40))
def test_correlations_and_ties_are_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, np.float64).T
    found = correlation(x, y)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert found.pearson is None and found.spearman is None
    else:
        assert found.pearson == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
        assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_rank_agreement_inside_episodes_is_the_mean_over_those_where_it_is_defined() -> None:
    data = walks(0, [4, 4, 3, 1])
    labels = np.array([1, 2, 3, 4, 1, 2, 3, 3, 5, 5, 5, 0], np.float32)
    reference = np.array([4, 3, 2, 1, 10, 20, 30, 30, 1, 2, 3, 0], np.float32)
    # -1, 1, not defined (labels never change), not defined (one step)
    found = quality(labels, reference, data)
    assert found.within_episodes.spearman == pytest.approx(0)
    assert found.within_episodes.n_episodes == 2
    assert any("not defined in 2" in note for note in found.notes)


def test_reward_variance_given_the_state_is_the_worked_value() -> None:
    # actions with probability .2, .5, .3 and reward .1, .5, .9: mean .54, variance .0784
    rewards = np.array([0.1] * 20 + [0.5] * 50 + [0.9] * 30, np.float32)
    found = quality(rewards, rewards, in_one_state([0] * 20 + [1] * 50 + [2] * 30))
    assert found.labels_spread.std_given_state == pytest.approx(np.sqrt(0.0784), rel=1e-6)
    assert found.labels_spread.share == pytest.approx(1)


def test_a_reward_of_the_state_alone_does_not_vary_given_the_state() -> None:
    rng = np.random.default_rng(0)
    places = np.array([[0.0, 0], [5, 5], [-5, 5]])
    which = rng.integers(3, size=1001)
    data = episodes(places[which], rng.normal(size=(1000, 1)).astype(np.float32), [1000])
    by_state = which[:1000].astype(np.float32)
    by_action = data.actions[:, 0]
    found = quality(by_state, by_action, data)
    assert found.labels_spread.share == pytest.approx(0, abs=1e-12)
    assert found.reference_spread.share == pytest.approx(1, abs=0.01)
    assert sum(n for n, _ in found.labels_spread.clusters) == 1000


def test_starc_of_a_bandit_is_the_angle_of_centred_rewards() -> None:
    # Canonical: reward minus its mean under the data's policy. a - 1 = (-1, 0, 1) and 1[a = 2] - 1/3; their cosine is
    # 1 / (sqrt(2) sqrt(2/3)) = .8660254, and half the distance of unit vectors is sqrt((1 - .8660254) / 2) = .2588190.
    data = in_one_state([0, 1, 2] * 40)
    actions = data.actions[:, 0]
    last = (actions == 2).astype(np.float32)
    assert quality(actions, last, data).starc == pytest.approx(0.2588190, abs=1e-6)
    assert quality(actions, -actions, data).starc == pytest.approx(1, abs=1e-6)
    assert quality(actions, 3 * actions + 7, data).starc == pytest.approx(0, abs=1e-6)


def test_starc_of_a_constant_reward_that_never_ends_is_that_of_none() -> None:
    data = in_one_state([0, 1, 2] * 40)
    found = quality(np.full(120, 4, np.float32), data.actions[:, 0], data)
    assert found.starc == pytest.approx(0.5)
    assert found.steps.pearson is None and found.calibration.slope is None
    assert any("labels: worth nothing" in note for note in found.notes)


@pytest.mark.parametrize("terminated", [True, False])
def test_starc_does_not_see_potentials_and_scales_that_correlations_do(terminated: bool) -> None:
    data = walks(3, [60, 5, 100, 1, 80], terminated=terminated)
    reward = np.random.default_rng(0).normal(size=data.n_steps)
    potential = np.asarray(data.observations, np.float64) @ np.array([5.0, -3, 2]) + 1
    rows = np.arange(data.n_steps) + data.episode_index
    after = potential[rows + 1] * data.continues
    shaped = 2 * reward + 0.99 * after - potential[rows]
    found = quality(shaped.astype(np.float32), reward.astype(np.float32), data)
    assert found.steps.pearson is not None and found.steps.pearson < 0.99
    assert found.starc == pytest.approx(0, abs=1e-4)  # float32 labels of size 10
    assert quality(reward.astype(np.float32), potential[rows].astype(np.float32), data).starc > 0.3


def table_data() -> Trajectories:
    """Every (s, a, s') of S = A = {0, 1} once, one step an episode."""
    triples = np.array(list(itertools.product([0, 1], repeat=3)))
    observations = triples[:, [0, 2]].reshape(-1, 1)
    return episodes(observations, triples[:, 1:2].astype(np.float32), [1] * 8)


def arrives(s: np.ndarray, a: np.ndarray, following: np.ndarray) -> np.ndarray:
    return (following[:, 0] == 1).astype(np.float64)


def acts(s: np.ndarray, a: np.ndarray, following: np.ndarray) -> np.ndarray:
    return (a[:, 0] == 1).astype(np.float64)


def both(s: np.ndarray, a: np.ndarray, following: np.ndarray) -> np.ndarray:
    return arrives(s, a, following) + acts(s, a, following)


def both_shaped(s: np.ndarray, a: np.ndarray, following: np.ndarray) -> np.ndarray:
    return 3 * both(s, a, following) + 0.99 * 10 * following[:, 0] - 10 * s[:, 0]


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [(arrives, acts, 0.70710678), (arrives, both, 0.38268343), (both, both_shaped, 0.0)],
)
def test_epic_distance_is_the_worked_value(first: RewardFunction, second: RewardFunction, distance: float) -> None:
    found = epic_distance(first, second, table_data())
    assert found == pytest.approx(distance, abs=1e-7)


def test_plain_pearson_distance_is_fooled_by_shaping() -> None:
    data = table_data()
    triple = (data.observations[::2], data.actions, data.observations[1::2])
    rho = correlation(both(*triple), both_shaped(*triple)).pearson
    assert rho is not None
    assert np.sqrt((1 - rho) / 2) == pytest.approx(0.40157600)


def test_epic_is_not_defined_for_labels_alone_and_is_computed_for_functions() -> None:
    data = table_data()
    labels = arrives(data.observations[::2], data.actions, data.observations[1::2]).astype(np.float32)
    reference = acts(data.observations[::2], data.actions, data.observations[1::2]).astype(np.float32)
    alone = quality(labels, reference, data)
    assert alone.epic is None
    assert any("EPIC is not defined" in note for note in alone.notes)
    assert quality(labels, reference, data, functions=(arrives, acts)).epic == pytest.approx(0.70710678)


def test_calibration_keeps_ties_together_and_says_slope_and_error() -> None:
    # Three values of label, 40 steps each: three bins whatever their number. reference = 2 label + 1.
    labels = np.array([0, 1, 2] * 40, np.float32)
    found = quality(labels, 2 * labels + 1, in_one_state([0] * 120)).calibration
    assert found.bins == ((40, 0, 1), (40, 1, 3), (40, 2, 5))
    assert (found.slope, found.intercept) == (pytest.approx(2), pytest.approx(1))
    # differences 1, 2, 3: root of 14 / 3
    assert found.error == pytest.approx(np.sqrt(14 / 3))


def test_the_interval_of_return_ranks_covers_the_truth() -> None:
    # Bivariate normal with correlation .8: Spearman's is 6 / pi asin(.4) = .7858. 150 draws of 40 episodes; a 95 %
    # interval misses 7.5 of them, with a standard deviation of 2.7.
    rng = np.random.default_rng(0)
    data = walks(0, [1] * 40)
    missed = 0
    for _ in range(150):
        x = rng.normal(size=40)
        y = 0.8 * x + 0.6 * rng.normal(size=40)
        interval = quality(x.astype(np.float32), y.astype(np.float32), data).returns.interval
        assert interval is not None
        missed += not interval[0] <= 0.7858 <= interval[1]
    assert missed <= 16


def test_long_sums_are_not_lost() -> None:
    # A float32 running sum of 0.1 a million times is 100,958.
    data = episodes(np.zeros((1_000_002, 1)), np.zeros((1_000_000, 1), np.float32), [999_999, 1])
    found = quality(np.full(1_000_000, 0.1, np.float32), np.full(1_000_000, 0.1, np.float32), data)
    assert found.calibration.bins[0][1] == pytest.approx(0.10000000149, rel=1e-10)


def test_a_value_that_is_missing_is_refused() -> None:
    data = walks(0, [3])
    with pytest.raises(DatasetError, match="1 of them not finite"):
        quality(np.array([1, np.nan, 2], np.float32), np.zeros(3, np.float32), data)
    with pytest.raises(DatasetError, match="for each of 3 steps"):
        quality(np.zeros(4, np.float32), np.zeros(3, np.float32), data)


@pytest.mark.parametrize("lengths", [[1], [1, 1], [2], [3, 1, 2]])
def test_tiny_data_gives_numbers_or_none(lengths: list[int]) -> None:
    data = walks(0, lengths)
    labels = np.arange(data.n_steps, dtype=np.float32)
    found = quality(labels, labels, data)
    assert Quality.model_validate_json(found.model_dump_json()) == found


def test_wide_observations_are_projected() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(202, 8, 8, 3)).astype(np.uint8)
    data = Trajectories(
        observations=images,
        actions=rng.integers(4, size=200),
        offsets=np.array([0, 100, 200]),
        terminated=np.array([True, False]),
        truncated=np.array([False, True]),
        final_observed=np.array([False, False]),
        n_actions=(4,),
    )
    reward = rng.normal(size=200).astype(np.float32)
    assert quality(reward, reward, data).starc == pytest.approx(0, abs=1e-9)


def test_the_same_seed_gives_the_same_numbers_and_a_hundred_thousand_steps_take_seconds() -> None:
    data = walks(0, [500] * 200, width=11)
    rng = np.random.default_rng(0)
    labels = rng.normal(size=100_000).astype(np.float32)
    reference = labels + rng.normal(size=100_000).astype(np.float32)
    started = time.perf_counter()
    found = quality(labels, reference, data)
    assert time.perf_counter() - started < 10
    assert found.steps.pearson == pytest.approx(np.sqrt(0.5), abs=0.01)
    assert quality(labels, reference, data) == found


def test_the_plot_has_four_panels_with_axes() -> None:
    data = walks(0, [30, 20])
    labels = np.random.default_rng(0).normal(size=50).astype(np.float32)
    figure = plot(labels, labels, data, quality(labels, labels, data))
    assert len(figure.axes) == 4
    assert all(axis.get_xlabel() and axis.get_ylabel() for axis in figure.axes)
