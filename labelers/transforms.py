"""Transforms of labels: separate from labelers, applied in the order given, part of the label id.

Three sorts, by what they must see. Of one step alone: `affine`, `clip`. Of the whole episode: the `smooth_*`, which
carry a reward to steps before it and after it (`smooth_ema` only after). Of the whole label set: `return_range` needs
the lowest and highest return, `standardise` mean and standard deviation of all steps; `measured` says what they found.
`preset` is a row of these under the name of the paper that uses it. All work in float64 and give float32.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from data.config import Config
from data.labels import episode_returns
from data.statistics import moments_of


class _Transform(Config):
    @abstractmethod
    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """[N] float32 of a whole label set, rewards [N] float32 in episodes given by offsets [E + 1]."""

    def measured(self, rewards: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
        """What `apply` takes from the whole label set, for the record; empty if it looks at steps or episodes alone."""
        return {}


class Affine(_Transform):
    """scale * r + shift."""

    kind: Literal["affine"] = "affine"
    scale: float = 1.0
    shift: float = 0.0

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return (rewards.astype(np.float64) * self.scale + self.shift).astype(np.float32)


class Clip(_Transform):
    """What is below `low` becomes `low`, what is above `high` becomes `high`; either may be left out."""

    kind: Literal["clip"] = "clip"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("clip needs `low`, `high` or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}")
        return self

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return np.clip(rewards.astype(np.float64), self.low, self.high).astype(np.float32)


class SmoothGaussian(_Transform):
    """Each reward spread over its neighbours by a Gaussian of `sigma` steps, cut at 4 sigma (Lee et al. 2024).

    Beyond an episode's ends its first and last reward go on, so a return is not kept exactly. Looks into the future.
    """

    kind: Literal["smooth_gaussian"] = "smooth_gaussian"
    sigma: float = Field(default=3.0, gt=0)

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        radius = int(4 * self.sigma + 0.5)
        steps = np.arange(-radius, radius + 1)
        weights = np.exp(-0.5 * (steps / self.sigma) ** 2)
        return _weighted_neighbours(rewards, offsets, steps, weights / weights.sum())


class SmoothUniform(_Transform):
    """The mean of `window` rewards around a step, from it on, or up to it (Lee et al. 2024).

    side: `centre`, as many on either side (an even window has one more in the future); `before`, a reward is paid on
        the `window` steps up to its own, which looks into the future; `after`, on those from its own on.
    Beyond an episode's ends its first and last reward go on.
    """

    kind: Literal["smooth_uniform"] = "smooth_uniform"
    window: int = Field(default=9, ge=1)
    side: Literal["centre", "before", "after"] = "centre"

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        first = {"centre": -((self.window - 1) // 2), "before": 0, "after": 1 - self.window}[self.side]
        steps = np.arange(first, first + self.window)
        return _weighted_neighbours(rewards, offsets, steps, np.full(self.window, 1 / self.window))


class SmoothEMA(_Transform):
    """r'_t = alpha r'_{t-1} + (1 - alpha) r_t from r'_0 = r_0: alpha weighs the past (Lee et al. 2024)."""

    kind: Literal["smooth_ema"] = "smooth_ema"
    alpha: float = Field(default=0.33, gt=0, lt=1)

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        # The sum over j of alpha^(t-j) x_j by doubling: after a pass, each step has the terms of twice as many steps.
        smooth = rewards.astype(np.float64)
        firsts = offsets[:-1]
        smooth *= 1 - self.alpha
        smooth[firsts] = rewards[firsts]
        lengths = np.diff(offsets)
        place = np.arange(len(rewards)) - np.repeat(firsts, lengths)
        reach = 1
        while reach < lengths.max() and self.alpha**reach > np.finfo(np.float64).tiny:
            later = np.flatnonzero(place >= reach)
            smooth[later] += self.alpha**reach * smooth[later - reach]
            reach *= 2
        return smooth.astype(np.float32)


class Standardise(_Transform):
    """(r - mean) / std over all steps of the label set. Constant rewards become 0, with a warning."""

    kind: Literal["standardise"] = "standardise"

    def measured(self, rewards: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
        moments = moments_of(rewards)
        return {"mean": float(moments.mean[0]), "std": float(moments.std[0])}

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        found = self.measured(rewards, offsets)
        if found["std"] == 0:
            warnings.warn(f"all rewards are {found['mean']:.6g}: standardised, they are 0", stacklevel=2)
            return np.zeros_like(rewards)
        return ((rewards.astype(np.float64) - found["mean"]) / found["std"]).astype(np.float32)


class ReturnRange(_Transform):
    """Scale so that highest and lowest return differ by `range` (Kostrikov et al. 2022 use 1000 on locomotion).

    Equal returns (range below 1e-6 of the largest return: float32 rounding) leave the rewards unscaled, with a warning.
    """

    kind: Literal["return_range"] = "return_range"
    range: float = Field(default=1000.0, gt=0)

    def measured(self, rewards: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
        returns = episode_returns(rewards, offsets)
        found = {"lowest_return": float(returns.min()), "highest_return": float(returns.max())}
        spread = found["highest_return"] - found["lowest_return"]
        if spread > 1e-6 * float(np.abs(returns).max()):
            found["factor"] = self.range / spread
        return found

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        found = self.measured(rewards, offsets)
        if "factor" not in found:
            lowest = found["lowest_return"]
            warnings.warn(f"all returns are {lowest:.6g}, there is no range to scale: rewards are left", stacklevel=2)
            return rewards
        return (rewards.astype(np.float64) * found["factor"]).astype(np.float32)


class Preset(_Transform):
    """What a paper's official code does to rewards before it trains IQL, by domain.

    otr-mujoco, otr-adroit: return range 1000. otr-antmaze: the same, then - 2 (Luo et al. 2023).
    iql-mujoco: return range 1000. iql-antmaze: - 1 (Kostrikov et al. 2022; its code leaves Adroit and kitchen as they
        are). OTR's baselines with true rewards use the iql presets, and otr-adroit on Adroit.
    """

    kind: Literal["preset"] = "preset"
    name: Literal["otr-mujoco", "otr-adroit", "otr-antmaze", "iql-mujoco", "iql-antmaze"]

    steps: ClassVar[dict[str, tuple[_Transform, ...]]] = {
        "otr-mujoco": (ReturnRange(),),
        "otr-adroit": (ReturnRange(),),
        "otr-antmaze": (ReturnRange(), Affine(shift=-2.0)),
        "iql-mujoco": (ReturnRange(),),
        "iql-antmaze": (Affine(shift=-1.0),),
    }

    def measured(self, rewards: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
        # At most the first step of a preset looks at the whole label set.
        return self.steps[self.name][0].measured(rewards, offsets)

    def apply(self, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        for step in self.steps[self.name]:
            rewards = step.apply(rewards, offsets)
        return rewards


def _weighted_neighbours(
    rewards: np.ndarray, offsets: np.ndarray, steps: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """[N] float32, sum over k of weights[k] r[t + steps[k]]; beyond an episode's ends its end rewards are repeated."""
    lengths = np.diff(offsets)
    first, last = np.repeat(offsets[:-1], lengths), np.repeat(offsets[1:] - 1, lengths)
    index, exact = np.arange(len(rewards)), rewards.astype(np.float64)
    smooth = np.zeros(len(rewards))
    for step, weight in zip(steps, weights, strict=True):
        smooth += weight * exact[np.clip(index + step, first, last)]
    return smooth.astype(np.float32)


Transform = Annotated[
    Affine | Clip | SmoothGaussian | SmoothUniform | SmoothEMA | Standardise | ReturnRange | Preset,
    Field(discriminator="kind"),
]
