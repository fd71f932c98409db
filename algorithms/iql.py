"""Implicit Q-learning (Kostrikov, Nair, Levine, "Offline RL with implicit Q-learning", ICLR 2022).

V is an upper expectile of Q over the actions in the data, so that Q never asks for the value of an action that is not
there; the policy imitates the data's actions, weighted by how far they exceed V.

Order of a step: that of CORL's implementation. All three losses are taken at the parameters before the step, with one
advantage and one V(s') for all, and stepped together; then the target follows. (The authors' JAX code updates V first
and uses the new V; both reproduce the paper.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, State
from algorithms.distributions import categorical_log_probability, gaussian_log_probability
from algorithms.policy import Policy
from algorithms.spec import Spec
from labelers.networks import Adam, Networks, generator

MAX_WEIGHT = 100.0
"""Advantage weights are clipped here, in the authors' code and in CORL."""

LOG_STD_RANGE = (-20.0, 2.0)
"""Of the Gaussian policy, in CORL."""


@dataclass(eq=False)
class IQLState(State):
    """value, actor: P networks. critic, target: two Q networks a member, 2 P in all, a member's own side by side.

    log_std: [P, 1, A], of the Gaussian policy; unused for discrete actions.
    """

    value: Networks
    critic: Networks
    target: Networks
    actor: Networks
    log_std: Tensor
    values_optimiser: Adam
    actor_optimiser: Adam


class IQL(Algorithm[IQLState]):
    """Implicit Q-learning, for continuous and discrete actions. Defaults are those for locomotion.

    expectile: in (0, 1); above 0.5, V leans to the better actions. temperature: >= 0, multiplies the advantage: 0
    imitates all actions alike. discount: of the future, in [0, 1]. target_rate: part of the way that the target follows
    at each step. hidden: widths of all networks. learning_rate: of Adam; the policy's falls to 0 over training, along a
    cosine.
    """

    kind: Literal["iql"] = "iql"
    expectile: float = Field(default=0.7, gt=0, lt=1)
    temperature: float = Field(default=3.0, ge=0)
    discount: float = Field(default=0.99, ge=0, le=1)
    target_rate: float = Field(default=0.005, gt=0, le=1)
    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (256, 256)
    learning_rate: float = Field(default=3e-4, gt=0)

    def init(self, spec: Spec, seeds: Sequence[int], steps: int, device: torch.device) -> IQLState:
        sources = [generator(seed, "initialisation") for seed in seeds]
        n_in, n_out = spec.n_inputs, spec.n_outputs
        value = Networks((n_in, *self.hidden, 1), sources, device)
        critic = Networks((n_in + n_out, *self.hidden, 1), [s for s in sources for _ in range(2)], device)
        actor = Networks((n_in, *self.hidden, n_out), sources, device)
        log_std = torch.zeros(len(seeds), 1, 0 if spec.n_actions else n_out, device=device, requires_grad=True)
        learned = [*value.parameters(), *critic.parameters()]
        imitating = [*actor.parameters(), *([log_std] if spec.n_actions is None else [])]
        return IQLState(
            spec=spec,
            value=value,
            critic=critic,
            target=critic.frozen(),
            actor=actor,
            log_std=log_std,
            values_optimiser=Adam(learned, self.learning_rate),
            actor_optimiser=Adam(imitating, self.learning_rate, decay_steps=steps),
        )

    def update(self, state: IQLState, batch: Batch) -> dict[str, Tensor]:
        observations, actions, n_actions = batch.observations, batch.actions, state.spec.n_actions
        pairs = torch.cat([observations, actions], dim=-1).repeat_interleave(2, dim=0)
        with torch.no_grad():
            next_value = state.value(batch.next_observations).squeeze(-1)
            backup = batch.rewards + self.discount * batch.discounts * next_value
            target_q = _by_member(state.target(pairs)).amin(1)
        q = _by_member(state.critic(pairs))
        advantage = target_q - state.value(observations).squeeze(-1)
        outputs = state.actor(observations)
        if n_actions is None:
            log_prob = gaussian_log_probability(outputs.tanh(), state.log_std.clamp(*LOG_STD_RANGE), actions)
        else:
            log_prob = categorical_log_probability(outputs, actions, n_actions)
        weight = advantage_weight(advantage.detach(), self.temperature)

        value_loss = expectile_loss(advantage, self.expectile).mean(1)
        q_loss = (backup.unsqueeze(1) - q).square().mean(2).sum(1)
        actor_loss = -(weight * log_prob).mean(1)
        loss = (value_loss + q_loss + actor_loss).sum()
        learned = [*state.values_optimiser.parameters, *state.actor_optimiser.parameters]
        gradients = torch.autograd.grad(loss, learned)
        n_values = len(state.values_optimiser.parameters)
        state.values_optimiser.step(gradients[:n_values])
        state.actor_optimiser.step(gradients[n_values:])
        state.target.follow(state.critic, self.target_rate)
        return {
            "value_loss": value_loss.detach(),
            "q_loss": q_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "advantage": advantage.detach().mean(1),
        }

    def policy(self, state: IQLState) -> Policy:
        return Policy(state.spec, state.actor, self.model_dump(mode="json"))


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Asymmetric squared error |expectile - 1(difference < 0)| * difference**2.

    difference: target minus prediction, any shape. expectile: in (0, 1); above 0.5, predictions that are too low cost
    more. Kostrikov et al. 2022, eq. 5.
    """
    return torch.where(difference < 0, 1 - expectile, expectile) * difference.square()


def advantage_weight(advantage: Tensor, temperature: float) -> Tensor:
    """min(exp(temperature * advantage), 100): how much an action is imitated. Kostrikov et al. 2022, eq. 7."""
    return torch.exp(temperature * advantage).clamp(max=MAX_WEIGHT)


def _by_member(values: Tensor) -> Tensor:
    """[2 P, B, 1] of two networks a member -> [P, 2, B]."""
    return values.view(-1, 2, values.shape[1])
