"""Moments: exact however the rows were cut, and honest about constants."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.statistics import Moments, MomentsOf, moments_of, standardise


@pytest.fixture(scope="module")
def constants() -> np.ndarray:
    """100,000 rows: 1.7, values that vary, 0."""
    block = np.round(np.random.default_rng(10).normal(size=1000), 3).astype(np.float32)
    rows = np.zeros((100_000, 3), np.float32)
    rows[:, 0], rows[:, 1] = 1.7, np.tile(block, 100)
    return rows


def test_a_constant_column_has_no_spread(constants):
    assert constants.std(0)[0] > 1e-3, "float32 gets this wrong, or the test shows nothing"
    moments = moments_of(constants)
    assert moments.std[0] == 0 and moments.std[2] == 0
    assert moments.constant.tolist() == [True, False, True]
    np.testing.assert_allclose(moments.mean, constants.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(moments.std[1], constants[:, 1].std(dtype=np.float64), rtol=1e-12)


def test_constant_columns_become_zero_and_later_values_stay_small(constants):
    moments = moments_of(constants)
    standard = standardise(constants, moments)
    assert standard.dtype == np.float32 and not standard[:, [0, 2]].any()
    assert abs(standardise(np.array([1.7001, 0, 0]), moments)[0]) < 1
    np.testing.assert_allclose(standard[:, 1].std(dtype=np.float64), 1, rtol=1e-6)


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-20, 1e20, 12345.678])
def test_rounding_alone_is_constant(value):
    rows = np.full((1000, 1), value, np.float32)
    rows[::2] = np.nextafter(rows[::2], np.float32(np.inf))
    moments = moments_of(rows)
    assert moments.constant.all() and moments.std[0] == 0
    assert not standardise(rows, moments).any()


def test_a_small_but_real_spread_is_not_constant():
    rows = np.array([[1e-9], [-1e-9], [3e-9]])
    assert not moments_of(rows).constant.any()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from(["<f4", "<f2", "u1", "<i8"]),
    st.integers(0, 2**32 - 1),
)
def test_pieces_and_whole_agree(sizes, dtype, seed):
    rows = (np.random.default_rng(seed).normal(50, 20, (sum(sizes), 3))).clip(0, 255).astype(dtype)
    pieces = MomentsOf()
    for piece in np.split(rows, np.cumsum(sizes)[:-1]):
        pieces.update(piece)
    got, exact = pieces.moments(), rows.astype(np.float64)
    assert got.count == len(rows)
    np.testing.assert_allclose(got.mean, exact.mean(0), rtol=1e-12)
    # The variance is a difference of squares up to 255^2: that many float64 steps.
    np.testing.assert_allclose(got.std**2, exact.var(0), rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(got.minimum, exact.min(0))
    np.testing.assert_array_equal(got.maximum, exact.max(0))


def test_images_have_statistics_for_each_channel():
    rows = np.random.default_rng(0).integers(0, 255, (5, 4, 4, 3)).astype(np.uint8)
    got = moments_of(rows)
    np.testing.assert_allclose(got.mean, rows.astype(float).mean((0, 1, 2)))
    assert got.count == 5 and got.mean.shape == (3,)


def test_json_keeps_every_bit(constants):
    moments = moments_of(constants)
    again = Moments.from_json(json.loads(json.dumps(moments.to_json())))
    for name in ("count", "mean", "std", "minimum", "maximum", "constant"):
        np.testing.assert_array_equal(getattr(again, name), getattr(moments, name))
