"""What an ensemble says of actions: how likely they are, which one to take, how sure it is, and how good that was.

Two kinds, by what actions are: `SquashedGaussian` for continuous ones, `Choices` for discrete and multi-discrete ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from data.config import Config

LOG_STD_RANGE = (-5.0, 2.0)
"""What log sigma is squashed into by tanh, in the official code of SS-ORL."""

MARGIN = 0.01
"""Scaled actions are taken as at least so far inside (-1, 1): the density of one at +-1 is not defined. Policies
saturate often, and a smaller margin spends the network on telling such actions from others, nearly as large."""


class HeldOutActions(Config):
    """How well continuous actions that were not trained on are foretold.

    n, n_episodes: how many, of how many episodes.
    r2: 1 - squared errors / squared deviations from the mean action, all dimensions together, in the dataset's units:
        1 if exact, 0 if no better than the mean. r2_per_dimension: each alone. None where actions do not vary.
    log_likelihood: mean over steps, of actions scaled to [-1, 1], under the equal mixture of the members; nats.
    z_rms: root mean square of (action - proxy) / std; 1 if calibrated, above 1 if the ensemble is too sure.
    within_2_std: share of actions closer than two std; .954 if calibrated and normal.
    The same episodes decide when training stops, so all of it is a little flattering.
    """

    n: int
    n_episodes: int
    r2: float | None
    r2_per_dimension: tuple[float | None, ...]
    log_likelihood: float
    z_rms: float
    within_2_std: float

    @property
    def explained(self) -> float | None:
        """Part of what varies that was foretold."""
        return self.r2


class HeldOutChoices(Config):
    """How well discrete actions that were not trained on are foretold.

    n, n_episodes: how many steps, of how many episodes.
    accuracy: share of choices foretold rightly, all dimensions together. accuracy_per_dimension: each alone.
    most_frequent: the accuracy of always saying the most frequent choice (of these steps).
    confidence: mean probability of the choice foretold; equal to `accuracy` if calibrated.
    log_likelihood: mean over steps, under the equal mixture of the members; nats.
    The same episodes decide when training stops, so all of it is a little flattering.
    """

    n: int
    n_episodes: int
    accuracy: float
    accuracy_per_dimension: tuple[float, ...]
    most_frequent: float
    confidence: float
    log_likelihood: float

    @property
    def explained(self) -> float | None:
        """Part of the mistakes of always saying the most frequent choice that was avoided; None if it makes none."""
        mistakes = 1 - self.most_frequent
        return None if mistakes == 0 else 1 - (1 - self.accuracy) / mistakes


HeldOut: TypeAlias = HeldOutActions | HeldOutChoices


class ActionModel(Protocol):
    """How outputs of M members, made by P = M * `networks_per_member` networks, are read.

    n_outputs: width of a network's output. n_dimensions: numbers in one action.
    """

    networks_per_member: ClassVar[int]

    @property
    def n_outputs(self) -> int: ...

    @property
    def n_dimensions(self) -> int: ...

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """[n, ...] of the dataset -> [n, n_outputs] float32: scaled to [-1, 1], or one-hot for each dimension."""

    def log_probability(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        """outputs: [P, B, n_outputs]. encoded: [M or 1, B, n_outputs]. Returns [M, B], each member's, in nats."""

    def predict(self, outputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """What the members together say of actions, and how unsure they are; [B, n_dimensions] float64 each.

        outputs: [P, B, n_outputs].
        """

    def judge(self, outputs: Tensor, actions: np.ndarray, n_episodes: int) -> HeldOut:
        """How good the predictions are. outputs: [P, n, n_outputs]. actions: [n, ...] of the dataset."""

    def state(self) -> dict[str, Tensor]:
        """What `restored` makes it of again."""


@dataclass(frozen=True, eq=False)
class SquashedGaussian:
    """a = tanh(u), u normal with diagonal covariance; the first M networks give its means, the other M its log sigmas.

    low, high: [A] float64, range of the dataset's actions, which are scaled from it to [-1, 1].
    """

    networks_per_member: ClassVar[int] = 2
    low: np.ndarray
    high: np.ndarray

    @property
    def n_outputs(self) -> int:
        return len(self.low)

    @property
    def n_dimensions(self) -> int:
        return len(self.low)

    @property
    def half_range(self) -> np.ndarray:
        """[A] float64, what a scaled action is multiplied with; 1 where there is no range."""
        return np.where(self.high > self.low, (self.high - self.low) / 2, 1.0)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        encoded: np.ndarray = (actions.reshape(len(actions), -1) - (self.low + self.high) / 2) / self.half_range
        return encoded.astype(np.float32)

    def log_probability(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        mean, log_std = self._moments(outputs)
        return squashed_log_probability(mean, log_std, encoded).sum(-1)

    def predict(self, outputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The mean over members of tanh(mu), in the dataset's units, and the variance, half the range being 1."""
        mean, log_std = (moment.double().cpu().numpy() for moment in self._moments(outputs))
        scaled, variance = mixture_moments(np.tanh(mean), np.exp(log_std))
        actions = (self.low + self.high) / 2 + self.half_range * scaled
        return np.clip(actions, self.low, self.high), variance

    def judge(self, outputs: Tensor, actions: np.ndarray, n_episodes: int) -> HeldOutActions:
        proxies, variance = self.predict(outputs)
        truth = actions.reshape(len(actions), -1).astype(np.float64)
        z = (truth - proxies) / (self.half_range * np.sqrt(variance))
        residuals = truth - proxies
        return HeldOutActions(
            n=len(truth),
            n_episodes=n_episodes,
            r2=explained_variance(residuals, truth),
            r2_per_dimension=tuple(
                explained_variance(residuals[:, [d]], truth[:, [d]]) for d in range(self.n_dimensions)
            ),
            log_likelihood=_mixture_log_likelihood(self, outputs, actions),
            z_rms=float(np.sqrt(np.mean(z**2))),
            within_2_std=float(np.mean(np.abs(z) <= 2)),
        )

    def state(self) -> dict[str, Tensor]:
        return {"action_low": torch.from_numpy(self.low), "action_high": torch.from_numpy(self.high)}

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """mu and log sigma of u, [M, B, A] each."""
        mean, raw = outputs.chunk(2)
        low, high = LOG_STD_RANGE
        return mean, low + (high - low) / 2 * (raw.tanh() + 1)


@dataclass(frozen=True, eq=False)
class Choices:
    """Independent choices, one for each action dimension; each network is a member and gives all logits.

    counts: number of choices in each dimension.
    """

    networks_per_member: ClassVar[int] = 1
    counts: tuple[int, ...]

    @property
    def n_outputs(self) -> int:
        return sum(self.counts)

    @property
    def n_dimensions(self) -> int:
        return len(self.counts)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        columns = actions.reshape(len(actions), -1).T
        return np.concatenate(
            [np.eye(n, dtype=np.float32)[column] for n, column in zip(self.counts, columns, strict=True)], axis=1
        )

    def log_probability(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        parts = [part.log_softmax(-1) for part in outputs.split(list(self.counts), dim=-1)]
        return (torch.cat(parts, dim=-1) * encoded).sum(-1)

    def predict(self, outputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The choice that is likeliest on average over members, and the probability that it is another one."""
        parts = [part.double().softmax(-1).mean(0).max(-1) for part in outputs.split(list(self.counts), dim=-1)]
        chosen = torch.stack([part.indices for part in parts], dim=-1).double().cpu().numpy()
        return chosen, 1 - torch.stack([part.values for part in parts], dim=-1).cpu().numpy()

    def judge(self, outputs: Tensor, actions: np.ndarray, n_episodes: int) -> HeldOutChoices:
        chosen, doubt = self.predict(outputs)
        truth = actions.reshape(len(actions), -1)
        right = chosen == truth
        return HeldOutChoices(
            n=len(truth),
            n_episodes=n_episodes,
            accuracy=float(right.mean()),
            accuracy_per_dimension=tuple(right.mean(0).tolist()),
            most_frequent=float(np.mean([np.bincount(column).max() / len(column) for column in truth.T])),
            confidence=float(1 - doubt.mean()),
            log_likelihood=_mixture_log_likelihood(self, outputs, actions),
        )

    def state(self) -> dict[str, Tensor]:
        return {"n_actions": torch.tensor(self.counts)}


def restored(state: Mapping[str, Tensor]) -> ActionModel:
    """The action model whose `state` is part of `state`. Raises KeyError if there is none."""
    if "n_actions" in state:
        return Choices(tuple(state["n_actions"].tolist()))
    return SquashedGaussian(state["action_low"].cpu().numpy(), state["action_high"].cpu().numpy())


def squashed_log_probability(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Log density of a = tanh(u) for u ~ Normal(mean, exp(log_std)): log N(atanh a) - log(1 - a^2).

    mean, log_std, actions: [...], actions in [-1, 1] and taken as `MARGIN` inside it. Returns [...], in nats.
    """
    inside = actions.clamp(-1 + MARGIN, 1 - MARGIN)
    deviation = (inside.atanh() - mean) * torch.exp(-log_std)
    normal = -0.5 * deviation.square() - log_std - 0.5 * math.log(2 * math.pi)
    return normal - torch.log1p(-inside.square())


def mixture_moments(means: np.ndarray, stds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of an equal mixture: mean sigma^2 + mean mu^2 - (mean mu)^2.

    means, stds: [M, ...]. Returns [...] each. Lakshminarayanan et al. 2017, sec. 2.4.
    """
    mean = means.mean(0)
    return mean, (stds**2).mean(0) + means.var(0)


def explained_variance(residuals: np.ndarray, actions: np.ndarray) -> float | None:
    """R2: 1 - squared residuals / squared deviations from the mean, summed over all dimensions; None if none deviate.

    residuals, actions: [n, A].
    """
    total = float(np.sum((actions - actions.mean(0)) ** 2))
    return None if total == 0 else 1 - float(np.sum(residuals**2)) / total


def _mixture_log_likelihood(model: ActionModel, outputs: Tensor, actions: np.ndarray) -> float:
    """log mean_m p_m(a), averaged over steps."""
    encoded = torch.from_numpy(model.encode(actions)).to(outputs.device)
    each = model.log_probability(outputs, encoded[None]).double()
    return float((each.logsumexp(0) - math.log(len(each))).mean())
