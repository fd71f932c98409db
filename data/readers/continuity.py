"""Whether recorded rows follow each other: by their next observations, or else by the length of their steps."""

from __future__ import annotations

import math

import numpy as np

TOLERANCE = 1e-5
"""Observations closer than this part of their size are the same, rounded on the way."""

LONG = 4.0
"""A step is long if some column moves so many times as far as in 99 % of steps. Measured in MuJoCo locomotion and
mazes: ordinary steps reach 3.4, and nine resets in ten are beyond 4.2, but for HalfCheetah's, which do not stand out.
Columns that hardly ever move are not looked at."""

SAMPLE = 1 << 14
"""So many steps show what an ordinary step is."""


def compare(observations: np.ndarray, recorded: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare the recorded next observations with the following rows.

    observations, recorded: [n, ...]. after: [m, ...] the rows after the first m, m = n or, at a file's end, n - 1.
    Returns [n] bool each: rows that *jump* (the following row differs in most of the columns that moved in the step:
    the recording was cut), and rows that go on though other columns changed. The last row of a file does neither.
    """
    n, m = len(observations), len(after)
    before, recorded, after = columns(observations[:m]), columns(recorded[:m]), columns(after)
    rows = np.flatnonzero((recorded != after).any(1))
    same = _same(recorded[rows], after[rows])
    moved = recorded[rows] != before[rows]
    moved[~moved.any(1)] = True
    jumps = 2 * (moved & ~same).sum(1) > moved.sum(1)
    jump, changed = np.zeros(n, bool), np.zeros(n, bool)
    jump[rows[jumps]] = True
    changed[rows[~jumps & ~same.all(1)]] = True
    return jump, changed


def long_steps(observations: np.ndarray, after: np.ndarray, flagged: np.ndarray) -> np.ndarray:
    """[m] bool, rows from which the following row is far (see LONG), for recordings without next observations.

    observations: [n, ...]. after: [m, ...] the rows after the first m. flagged: [n] bool, rows that end an episode.
    What is ordinary is seen on rows with no flag on them or beside them; with fewer than three, nothing is long.
    """
    m = len(after)
    beside = np.convolve(flagged, np.ones(3), mode="same")[:m] > 0
    apart = np.flatnonzero(~beside)
    sample = apart[:: max(1, len(apart) // SAMPLE)]
    if len(sample) < 3:
        return np.zeros(m, bool)
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.abs(columns(after).astype(np.float32) - columns(observations[:m]).astype(np.float32))
        usual = np.quantile(step[sample], 0.99, axis=0)
        long: np.ndarray = np.any(step > np.where(usual > 0, LONG * usual, np.inf), axis=1)
    return long


def columns(rows: np.ndarray) -> np.ndarray:
    """[n, D] of rows [n, ...]."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n, D] of a, b [n, D]: equal but for rounding.

    NaN equals anything, since it cannot show a difference; but a row of NaN alone equals nothing, it is no observation.
    """
    with np.errstate(invalid="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        close = np.abs(x - y) <= TOLERANCE * np.minimum(np.abs(x), np.abs(y))
    nan = np.isnan(x)
    same: np.ndarray = close | nan | np.isnan(y) | (x == y)
    same[nan.all(1)] = False
    return same
