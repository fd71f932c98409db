"""What an algorithm is: a configuration that makes a population of learners, updates them, and gives their policies.

The population axis: P runs (seeds x label sets) train as one program. Every network weight, batch and loss has a
leading axis P; losses are reduced over the batch but never over P, and their sum is differentiated, so that each member
learns exactly as if alone. P = 1 is the ordinary case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from algorithms.policy import Policy
from algorithms.spec import Spec
from data.config import Config
from labelers.networks import load_tensors


@dataclass(frozen=True, eq=False)
class Batch:
    """B transitions for each of P members, as networks read them (`algorithms/spec.py`).

    observations, next_observations: [P, B, D] float32, standardised. actions: [P, B, A] float32, encoded.
    rewards: [P, B] float32, each member's own labels. discounts: [P, B] float32, 0 after a termination, else 1: what
        an algorithm's own discount factor is multiplied with.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    discounts: Tensor


class Stateful(Protocol):
    """Anything with tensors that training changes: networks, optimisers."""

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name."""

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_dict`, in place. Raises KeyError or ValueError if names or shapes differ."""


@dataclass(eq=False)
class State:
    """All that an algorithm's training changes, updated in place. A subclass adds tensors and `Stateful` fields.

    spec: of the data; no part of `state_dict`.
    """

    spec: Spec

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name (`field` or `field.name`); loading it into a fresh state resumes exactly."""
        named: dict[str, Tensor] = {}
        for part, held in self._parts().items():
            if isinstance(held, Tensor):
                named[part] = held.detach()
            else:
                named |= {f"{part}.{name}": tensor for name, tensor in held.state_dict().items()}
        return named

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state_dict`, in place. Raises KeyError or ValueError if names or shapes differ."""
        for part, held in self._parts().items():
            if isinstance(held, Tensor):
                load_tensors({part: held.detach()}, {part: tensors[part]})
            else:
                own = {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
                held.load_state_dict(own)

    def _parts(self) -> dict[str, Tensor | Stateful]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spec"}


S = TypeVar("S", bound=State)


class Algorithm(Config, Generic[S]):
    """Base of every algorithm's configuration; a subclass adds `kind` and its settings."""

    kind: str

    @abstractmethod
    def init(self, spec: Spec, seeds: Sequence[int], steps: int, device: torch.device) -> S:
        """A fresh population, one member per seed; a member depends on its seed alone.

        steps: updates that are planned, for schedules. Raises ConfigurationError if the algorithm does not fit the data
        (continuous actions only, say), naming those that do.
        """

    @abstractmethod
    def update(self, state: S, batch: Batch) -> dict[str, Tensor]:
        """One step for every member, in place. Returns metrics by name, each [P], detached."""

    @abstractmethod
    def policy(self, state: S) -> Policy:
        """The current policies; they share the state's tensors and change with it."""
