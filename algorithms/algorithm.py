"""What an algorithm is: a configuration that makes a population of learners, updates them, and gives their policies.

The population axis: P runs (seeds x label sets) train as one program. Every network weight, batch and loss has a
leading axis P; losses are reduced over the batch but never over P, and their sum is differentiated, so that each member
learns exactly as if alone. P = 1 is the ordinary case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.config import Config


@dataclass(frozen=True, eq=False)
class Spec:
    """What a learner must know of the data before it sees any.

    observation_shape, action_shape: of one step. n_actions: as in `Trajectories`, None for continuous actions.
    observation_mean, observation_std: [*observation_shape] float32, for standardising; constant columns have std 1.
    action_low, action_high: [*action_shape] float32, for continuous actions: declared bounds, else the data's range.
    """

    observation_shape: tuple[int, ...]
    action_shape: tuple[int, ...]
    n_actions: tuple[int, ...] | None
    observation_mean: np.ndarray
    observation_std: np.ndarray
    action_low: np.ndarray | None
    action_high: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Batch:
    """B transitions for each of P members.

    observations, next_observations: [P, B, *observation] float32, standardised. actions: [P, B, *action].
    rewards: [P, B] float32, each member's own labels. discounts: [P, B] float32, 0 after a termination, else the
        discount factor.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    discounts: Tensor


class State(Protocol):
    """All that training changes: networks, optimiser moments, step counts, generators. Updated in place."""

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name; loading it into a fresh state resumes exactly."""

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`. Raises KeyError or ValueError if names or shapes differ."""


class Policy(Protocol):
    """P policies, acting on raw (not standardised) observations; what is saved and evaluated."""

    def act(self, observations: Tensor) -> Tensor:
        """[P, B, *observation] -> [P, B, *action], the policy's best action, within bounds."""


S = TypeVar("S", bound=State)


class Algorithm(Config, Generic[S]):
    """Base of every algorithm's configuration; a subclass adds `kind` and its settings."""

    kind: str

    @abstractmethod
    def init(self, spec: Spec, seeds: Sequence[int], device: torch.device) -> S:
        """A fresh population, one member per seed; a member depends on its seed alone. Raises ConfigurationError if the
        algorithm does not fit the data (continuous actions only, say), naming those that do."""

    @abstractmethod
    def update(self, state: S, batch: Batch) -> dict[str, Tensor]:
        """One step for every member, in place. Returns metrics by name, each [P], detached."""

    @abstractmethod
    def policy(self, state: S) -> Policy:
        """The current policies."""
