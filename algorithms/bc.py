"""Behavioural cloning: imitate every action in the data, whatever it was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, State
from algorithms.distributions import categorical_log_probability
from algorithms.policy import Policy
from algorithms.spec import Spec
from labelers.networks import Adam, Networks, generator


@dataclass(eq=False)
class BCState(State):
    """actor: P networks."""

    actor: Networks
    optimiser: Adam


class BC(Algorithm[BCState]):
    """Behavioural cloning: squared error for continuous actions, cross-entropy for discrete ones.

    hidden: widths of the network. learning_rate: of Adam.
    """

    kind: Literal["bc"] = "bc"
    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    learning_rate: float = Field(default=3e-4, gt=0)

    def init(self, spec: Spec, seeds: Sequence[int], steps: int, device: torch.device) -> BCState:
        sources = [generator(seed, "initialisation") for seed in seeds]
        actor = Networks((spec.n_inputs, *self.hidden, spec.n_outputs), sources, device)
        return BCState(spec, actor, Adam(actor.parameters(), self.learning_rate))

    def update(self, state: BCState, batch: Batch) -> dict[str, Tensor]:
        loss = cloning_loss(state.actor(batch.observations), batch.actions, state.spec.n_actions)
        state.optimiser.step(torch.autograd.grad(loss.sum(), state.optimiser.parameters))
        return {"actor_loss": loss.detach()}

    def policy(self, state: BCState) -> Policy:
        return Policy(state.spec, state.actor, self.model_dump(mode="json"))


def cloning_loss(outputs: Tensor, actions: Tensor, n_actions: tuple[int, ...] | None) -> Tensor:
    """Mean over batch and dimensions of (tanh(output) - action)**2; for discrete actions mean of -log pi(action).

    outputs: [P, B, A] of the network. actions: [P, B, A] encoded. Returns [P].
    """
    if n_actions is None:
        return (outputs.tanh() - actions).square().mean((1, 2))
    return -categorical_log_probability(outputs, actions, n_actions).mean(1)
