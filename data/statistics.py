"""Moments in float64 over any number of rows, with an honest test for constant columns.

A float32 standard deviation of a constant column is not zero: rounding leaves 3e-8 of 0.3 and 2e-3 of 1.7 over
100,000 rows, and dividing by it turns rounding into data. Here sums run in float64 over differences from the first
row, so a constant column has a spread of exactly zero, and columns that vary by float32 rounding alone count as
constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""A column is constant if its range is at most this part of its largest magnitude: four float32 steps."""

PIECE = 1 << 16
"""Values turned to float64 at a time: small enough for the cache."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of `count` rows, one entry a column [D].

    mean, std: float64; std is the population's and exactly 0 for constant columns. minimum, maximum: float64.
    constant: bool, whether the column holds one value, but for float32 rounding.
    Rows of more than one axis (images) have one entry for each place of the last axis.
    """

    count: int
    mean: np.ndarray
    std: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    constant: np.ndarray

    @property
    def scale(self) -> np.ndarray:
        """[D] float64, what to divide by: the standard deviation, 1 for constant columns."""
        return np.where(self.constant, 1.0, self.std)

    def to_json(self) -> dict[str, JsonValue]:
        """As stored in manifests."""
        columns = {name: getattr(self, name).tolist() for name in ("mean", "std", "minimum", "maximum", "constant")}
        return {"count": self.count, **columns}

    @classmethod
    def from_json(cls, value: Mapping[str, JsonValue]) -> Moments:
        """The inverse of `to_json`, exact to the last bit."""
        columns = {k: np.asarray(value[k], np.float64) for k in ("mean", "std", "minimum", "maximum")}
        count = value["count"]
        assert isinstance(count, int)
        return cls(count=count, constant=np.asarray(value["constant"], bool), **columns)


class MomentsOf:
    """Moments of rows fed in pieces; how they were cut changes nothing beyond float64 rounding."""

    def __init__(self) -> None:
        self._count = 0
        self._values = 0
        self._origin = np.zeros(0)
        self._sum = self._square = np.zeros(0)
        self._minimum = self._maximum = np.zeros(0)

    def update(self, rows: np.ndarray) -> None:
        """Add `rows` [n, ...], any numeric dtype."""
        if len(rows) == 0:
            return
        columns = rows.reshape(-1, rows.shape[-1]) if rows.ndim > 1 else rows.reshape(-1, 1)
        if self._values == 0:
            self._origin = columns[0].astype(np.float64)
            self._sum, self._square = np.zeros_like(self._origin), np.zeros_like(self._origin)
            self._minimum, self._maximum = self._origin, self._origin
        stride = max(1, PIECE // columns.shape[1])
        for start in range(0, len(columns), stride):
            # Columns first: reductions along the last axis are several times faster, and sum pairwise.
            piece = np.ascontiguousarray(columns[start : start + stride].T).astype(np.float64)
            self._minimum = np.minimum(self._minimum, piece.min(1))
            self._maximum = np.maximum(self._maximum, piece.max(1))
            piece -= self._origin[:, None]
            self._sum = self._sum + piece.sum(1)
            self._square = self._square + np.einsum("dn,dn->d", piece, piece)
        self._count += len(rows)
        self._values += len(columns)

    def moments(self) -> Moments:
        """Moments of all rows so far; at least one."""
        assert self._values, "moments of no rows"
        shift = self._sum / self._values
        variance = np.maximum(self._square / self._values - shift**2, 0.0)
        magnitude = np.maximum(np.abs(self._minimum), np.abs(self._maximum))
        constant = self._maximum - self._minimum <= ROUNDING * magnitude
        return Moments(
            count=self._count,
            mean=self._origin + shift,
            std=np.where(constant, 0.0, np.sqrt(variance)),
            minimum=self._minimum,
            maximum=self._maximum,
            constant=constant,
        )


def moments_of(rows: np.ndarray) -> Moments:
    """Moments of `rows` [n, ...], at least one row."""
    accumulated = MomentsOf()
    accumulated.update(rows)
    return accumulated.moments()


def standardise(values: np.ndarray, moments: Moments) -> np.ndarray:
    """(values - mean) / std in float64, as float32; constant columns become 0.

    values: [..., D]. A value seen later that differs a little from a constant column gives a number as small as the
    difference, since such columns are not divided.
    """
    centred = (values - moments.mean) / moments.scale
    rounding = moments.constant & (np.abs(centred) <= ROUNDING * np.maximum(np.abs(moments.mean), 1e-300))
    standard: np.ndarray = np.where(rounding, 0.0, centred).astype(np.float32)
    return standard
