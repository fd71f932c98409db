"""Transforms: worked values, agreement with scipy, and what they do when there is nothing to scale."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy.ndimage import convolve, gaussian_filter1d

from data.labels import episode_returns
from labelers.transforms import (
    Affine,
    Clip,
    Preset,
    ReturnRange,
    SmoothEMA,
    SmoothGaussian,
    SmoothUniform,
    Standardise,
    Transform,
)

ONE = np.array([0, 8])
"""Offsets of one episode of eight steps."""

EVENT = np.array([0, 0, 0, 1, 0, 0, 0, 0], np.float32)
"""Eight steps and one event, on step 3."""

SCALE = np.array([2.0, 1.7760000, 2, 0, 3, 3, 3.0039999, 0, 0, 9, 0.1960001, 0], np.float32)
"""Three episodes of 4, 5 and 3 steps with returns 5.776, 9.0039999 and 9.1960001."""

SCALE_OFFSETS = np.array([0, 4, 9, 12])


def random_episodes(seed: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.random.default_rng(seed).normal(size=sum(lengths)).astype(np.float32)
    return rewards, np.concatenate([[0], np.cumsum(lengths)])


def test_gaussian_spreads_an_event_by_the_worked_values() -> None:
    expected = [0.08065920, 0.10648569, 0.12579798, 0.13298454, 0.12579798, 0.10648569, 0.08065920, 0.05467158]
    smooth = SmoothGaussian(sigma=3).apply(EVENT, ONE)
    assert smooth == pytest.approx(expected, rel=1e-6)
    assert smooth.sum() == pytest.approx(0.81354187, rel=1e-6)  # the return is not kept at an episode's ends


def test_ema_carries_an_event_forward_only() -> None:
    # .67, then times .33 a step.
    assert SmoothEMA().apply(EVENT, ONE) == pytest.approx([0, 0, 0, 0.67, 0.2211, 0.072963, 0.02407779, 0.00794567])


def test_ema_starts_at_the_first_reward() -> None:
    # 2; .33 * 2 + .67 * 4 = 3.34; .33 * 3.34 + .67 * 1 = 1.7722
    smooth = SmoothEMA().apply(np.array([2, 4, 1], np.float32), np.array([0, 3]))
    assert smooth == pytest.approx([2, 3.34, 1.7722])


def test_uniform_pays_around_before_or_after_an_event() -> None:
    def paid(side: str) -> list[int]:
        smooth = SmoothUniform.model_validate({"window": 5, "side": side}).apply(EVENT, ONE)
        assert set(smooth.tolist()) == {0, np.float32(0.2)}
        return np.flatnonzero(smooth).tolist()

    assert paid("centre") == [1, 2, 3, 4, 5]
    assert paid("before") == [0, 1, 2, 3]
    assert paid("after") == [3, 4, 5, 6, 7]


@given(st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_smoothing_is_scipys_within_each_episode(seed: int, lengths: list[int]) -> None:
    rewards, offsets = random_episodes(seed, lengths)
    ours = {
        "gaussian": SmoothGaussian(sigma=3).apply(rewards, offsets),
        "centre": SmoothUniform(window=9).apply(rewards, offsets),
        "even": SmoothUniform(window=4).apply(rewards, offsets),
        "before": SmoothUniform(window=5, side="before").apply(rewards, offsets),
        "after": SmoothUniform(window=5, side="after").apply(rewards, offsets),
    }
    for start, end in itertools.pairwise(offsets):
        episode = rewards[start:end].astype(np.float64)
        kernels = {
            "centre": [1] * 9,
            "even": [1] * 4,
            "before": [1] * 5 + [0] * 4,
            "after": [0] * 4 + [1] * 5,
        }
        theirs = {
            name: convolve(episode, np.array(kernel) / sum(kernel), mode="nearest") for name, kernel in kernels.items()
        }
        theirs["gaussian"] = gaussian_filter1d(episode, 3, mode="nearest")
        for name, expected in theirs.items():
            # float32 rounding of numbers of size 1
            np.testing.assert_allclose(ours[name][start:end], expected, atol=1e-6)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 200), min_size=1, max_size=6), st.floats(0.01, 0.99))
def test_ema_is_the_recursion_within_each_episode(seed: int, lengths: list[int], alpha: float) -> None:
    rewards, offsets = random_episodes(seed, lengths)
    expected = np.zeros(len(rewards))
    for start, end in itertools.pairwise(offsets):
        past = float(rewards[start])
        for step in range(start, end):
            past = alpha * past + (1 - alpha) * float(rewards[step])
            expected[step] = past
    np.testing.assert_allclose(SmoothEMA(alpha=alpha).apply(rewards, offsets), expected, atol=1e-6)


def test_standardised_rewards_have_mean_0_and_std_1_over_the_whole_label_set() -> None:
    # mean 2, population standard deviation sqrt((1 + 0 + 1 + 0) / 4) = .70710678
    rewards = np.array([1, 2, 3, 2], np.float32)
    offsets = np.array([0, 1, 4])
    assert Standardise().apply(rewards, offsets) == pytest.approx([-1.41421356, 0, 1.41421356, 0])
    assert Standardise().measured(rewards, offsets) == pytest.approx({"mean": 2, "std": 0.70710678})


def test_constant_rewards_are_standardised_to_0_with_a_warning() -> None:
    # A float32 standard deviation of 1.7 repeated 100,000 times is 0.0017, and the result -0.9995.
    rewards = np.full(100_000, 1.7, np.float32)
    with pytest.warns(UserWarning, match=r"all rewards are 1\.7"):
        assert not Standardise().apply(rewards, np.array([0, 100_000])).any()


def test_clip_bounds_what_is_outside() -> None:
    rewards = np.array([-3, 0.5, 2], np.float32)
    assert Clip(low=-1, high=1).apply(rewards, np.array([0, 3])).tolist() == [-1, 0.5, 1]
    assert Clip(high=1).apply(rewards, np.array([0, 3])).tolist() == [-3, 0.5, 1]


@pytest.mark.parametrize("bounds", [{}, {"low": 1, "high": 1}, {"low": 2, "high": 1}])
def test_clip_refuses_bounds_that_say_nothing(bounds: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="low"):
        Clip.model_validate(bounds)


def test_return_range_scales_by_1000_over_the_range_of_whole_episodes() -> None:
    assert episode_returns(SCALE, SCALE_OFFSETS) == pytest.approx([5.776, 9.0039999, 9.1960001])
    assert ReturnRange().measured(SCALE, SCALE_OFFSETS)["factor"] == pytest.approx(292.397656, rel=1e-6)
    scaled = ReturnRange().apply(SCALE, SCALE_OFFSETS)
    assert np.ptp(episode_returns(scaled, SCALE_OFFSETS)) == pytest.approx(1000, rel=1e-6)


def test_return_range_of_the_worked_returns() -> None:
    # returns 120, -30, 70: 1000 / 150
    rewards, offsets = np.array([120, -30, 70], np.float32), np.array([0, 1, 2, 3])
    assert ReturnRange().apply(rewards, offsets) == pytest.approx([800, -200, 466.666667])


def test_equal_returns_but_for_rounding_are_left_unscaled_with_a_warning() -> None:
    rewards = np.array([3, 3, 3, 3, 2, 2, 2, 2, 4, 4, 4, np.float32(4.000000477)], np.float32)
    offsets = np.array([0, 4, 9, 12])
    assert episode_returns(rewards, offsets) == pytest.approx([12, 12, 12], abs=1e-6)
    with pytest.warns(UserWarning, match="all returns are 12, there is no range to scale"):
        assert ReturnRange().apply(rewards, offsets) is rewards
    with pytest.warns(UserWarning, match="all returns are 0"):
        ReturnRange().apply(np.zeros(12, np.float32), offsets)


def test_a_second_application_needs_a_second_request() -> None:
    # 10 r - 5 over 12 steps: 10 * 23.976 - 60 = 179.76; again: 1797.6 - 60 = 1737.6
    once = Affine(scale=10, shift=-5).apply(SCALE, SCALE_OFFSETS)
    twice = Affine(scale=10, shift=-5).apply(once, SCALE_OFFSETS)
    assert once.astype(np.float64).sum() == pytest.approx(179.76, rel=1e-6)
    assert twice.astype(np.float64).sum() == pytest.approx(1737.6, rel=1e-6)


def test_presets_are_what_the_papers_do() -> None:
    scaled = ReturnRange().apply(SCALE, SCALE_OFFSETS)
    for name in ("otr-mujoco", "otr-adroit", "iql-mujoco"):
        assert Preset.model_validate({"name": name}).apply(SCALE, SCALE_OFFSETS).tolist() == scaled.tolist()
    assert Preset(name="otr-antmaze").apply(SCALE, SCALE_OFFSETS) == pytest.approx(scaled - 2, rel=1e-6)
    assert Preset(name="iql-antmaze").apply(SCALE, SCALE_OFFSETS) == pytest.approx(SCALE - 1)
    assert Preset(name="otr-antmaze").measured(SCALE, SCALE_OFFSETS)["factor"] == pytest.approx(292.397656, rel=1e-6)


EVERY: list[Transform] = [
    Affine(scale=2, shift=1),
    Clip(low=-1),
    SmoothGaussian(),
    SmoothUniform(),
    SmoothEMA(),
    Standardise(),
    ReturnRange(),
    Preset(name="otr-antmaze"),
]


@pytest.mark.parametrize("transform", EVERY, ids=lambda t: t.kind)
def test_every_transform_is_read_back_from_json_and_permutes_with_the_episodes(transform: Transform) -> None:
    adapter: TypeAdapter[Transform] = TypeAdapter(Transform)
    assert adapter.validate_python(transform.model_dump(mode="json")) == transform
    rewards, offsets = random_episodes(0, [5, 1, 8])
    kept = rewards.copy()
    here = transform.apply(rewards, offsets)
    there = transform.apply(
        np.concatenate([rewards[6:14], rewards[:5], rewards[5:6]]), np.concatenate([[0], np.cumsum([8, 5, 1])])
    )
    assert here.dtype == np.float32 and np.isfinite(here).all()
    assert (rewards == kept).all()
    # order of summation changes statistics in the last float64 digits
    np.testing.assert_allclose(np.concatenate([there[8:13], there[13:], there[:8]]), here, rtol=1e-6)


@pytest.mark.parametrize("transform", [t for t in EVERY if t.kind.startswith("smooth")], ids=lambda t: t.kind)
def test_smoothing_never_crosses_an_episode(transform: Transform) -> None:
    rewards, offsets = random_episodes(1, [4, 30])
    changed = rewards.copy()
    changed[4:] = 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transform.apply(changed, offsets)[:4].tolist() == transform.apply(rewards, offsets)[:4].tolist()
