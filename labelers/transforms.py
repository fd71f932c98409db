"""Transforms of labels: separate from labelers, applied in the order given, part of the label id."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from data.config import Config
from data.labels import episode_returns


class _Transform(Config):
    @abstractmethod
    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """[N] float32 of rewards [N] float32 in episodes given by offsets [E + 1]."""


class Affine(_Transform):
    """scale * r + shift, in float64."""

    kind: Literal["affine"] = "affine"
    scale: float = 1.0
    shift: float = 0.0

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return (rewards.astype(np.float64) * self.scale + self.shift).astype(np.float32)


class ReturnRange(_Transform):
    """Scale so that highest and lowest return differ by `range` (Kostrikov et al. 2022 use 1000 on locomotion).

    Equal returns (range below 1e-6 of the largest return: float32 rounding) leave the rewards unscaled, with a warning.
    """

    kind: Literal["return_range"] = "return_range"
    range: float = Field(default=1000.0, gt=0)

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        returns = episode_returns(rewards, offsets)
        spread = float(np.ptp(returns))
        if spread <= 1e-6 * float(np.abs(returns).max()):
            warnings.warn(
                f"all returns are {returns[0]:.6g}, there is no range to scale: rewards are left", stacklevel=2
            )
            return rewards
        return (rewards.astype(np.float64) * (self.range / spread)).astype(np.float32)


Transform = Annotated[Affine | ReturnRange, Field(discriminator="kind")]
