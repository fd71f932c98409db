import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms import IQL
from algorithms.algorithm import Batch
from algorithms.distributions import categorical_log_probability, gaussian_log_probability
from algorithms.iql import advantage_weight, expectile_loss
from algorithms.spec import Spec
from labelers.networks import Networks


def test_expectile_loss_by_hand_at_both_signs() -> None:
    # u = q - v = (1, -2), expectile 0.7: (0.7 * 1 + 0.3 * 4) / 2 = 0.95.
    value = torch.tensor([[0.0, 2.0]], requires_grad=True)
    loss = expectile_loss(torch.tensor([[1.0, 0.0]]) - value, 0.7).mean(1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.95])
    # dL/dv = -2 w u / 2: -0.7 * 1 and -0.3 * -2. A value that is too low is pulled up.
    assert value.grad is not None
    assert value.grad.flatten().tolist() == pytest.approx([-0.7, 0.6])


def test_advantage_weights_by_hand_and_clipped() -> None:
    # exp(3 * 0.5) = 4.481689, exp(3 * -0.5) = 0.223130, exp(3 * 2) = 403.43 -> 100, exp(3 * 1000) overflows -> 100.
    weights = advantage_weight(torch.tensor([0.5, -0.5, 2.0, 1000.0]), 3.0)
    assert weights.tolist() == pytest.approx([4.481689, 0.223130, 100.0, 100.0], rel=1e-6)


def test_gaussian_log_probability_is_that_of_pytorch() -> None:
    source = torch.Generator().manual_seed(0)
    mean, actions, log_std = (torch.randn(2, shape, 3, generator=source) for shape in (5, 5, 1))
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(-1)
    torch.testing.assert_close(gaussian_log_probability(mean, log_std, actions), expected)


def test_categorical_log_probability_is_that_of_pytorch() -> None:
    source = torch.Generator().manual_seed(0)
    logits, chosen = torch.randn(2, 5, 7, generator=source), torch.randint(3, (2, 5), generator=source)
    one_hot = torch.cat([functional.one_hot(chosen, 3), functional.one_hot(chosen, 4)], dim=-1).float()
    expected = sum(torch.distributions.Categorical(logits=p).log_prob(chosen) for p in logits.split([3, 4], dim=-1))
    torch.testing.assert_close(categorical_log_probability(logits, one_hot, (3, 4)), expected)


def spec(n_actions: tuple[int, ...] | None = None) -> Spec:
    return Spec(
        observation_shape=(3,),
        action_shape=(2,) if n_actions is None else (),
        n_actions=n_actions,
        observation_mean=np.zeros(3),
        observation_scale=np.ones(3),
        action_low=-np.ones(0 if n_actions else 2, np.float32),
        action_high=np.ones(0 if n_actions else 2, np.float32),
    )


def batch(n_members: int, seed: int, n_actions: tuple[int, ...] | None = None) -> Batch:
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(n_members, 16, *shape, generator=source)

    actions = draw(2).tanh()
    if n_actions is not None:
        actions = functional.one_hot(torch.randint(n_actions[0], (n_members, 16), generator=source), n_actions[0])
    return Batch(
        observations=draw(3),
        actions=actions.float(),
        rewards=3 * draw(),
        next_observations=draw(3),
        discounts=(torch.rand(n_members, 16, generator=source) > 0.2).float(),
    )


class PlainIQL:
    """One member of IQL after its paper and CORL's order, from separate modules and PyTorch's own optimisers."""

    def __init__(self, iql: IQL, value: nn.Module, critics: list[nn.Module], actor: nn.Module, steps: int) -> None:
        self.iql, self.value, self.critics, self.actor = iql, value, critics, actor
        self.targets = [nn.Sequential(*_copied(critic)) for critic in critics]
        self.log_std = nn.Parameter(torch.zeros(2))
        self.value_optimiser = torch.optim.Adam(value.parameters(), lr=iql.learning_rate)
        q_parameters = [p for critic in critics for p in critic.parameters()]
        self.q_optimiser = torch.optim.Adam(q_parameters, lr=iql.learning_rate)
        self.actor_optimiser = torch.optim.Adam([*actor.parameters(), self.log_std], lr=iql.learning_rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.actor_optimiser, steps)

    def update(self, o: Tensor, a: Tensor, r: Tensor, next_o: Tensor, d: Tensor) -> list[float]:
        iql, pair = self.iql, torch.cat([o, a], 1)
        with torch.no_grad():
            q_target = torch.minimum(*(target(pair)[:, 0] for target in self.targets))
            next_v = self.value(next_o)[:, 0]
        u = q_target - self.value(o)[:, 0]
        value_loss = torch.where(u > 0, iql.expectile * u**2, (1 - iql.expectile) * u**2).mean()
        _step(self.value_optimiser, value_loss)
        q_loss = sum(functional.mse_loss(q(pair)[:, 0], r + iql.discount * d * next_v) for q in self.critics)
        _step(self.q_optimiser, q_loss)
        for target, critic in zip(self.targets, self.critics, strict=True):
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.data.copy_((1 - iql.target_rate) * old.data + iql.target_rate * new.data)
        density = torch.distributions.Normal(self.actor(o).tanh(), self.log_std.clamp(-20, 2).exp())
        weight = torch.exp(iql.temperature * u.detach()).clamp(max=100)
        actor_loss = -(weight * density.log_prob(a).sum(1)).mean()
        _step(self.actor_optimiser, actor_loss)
        self.schedule.step()
        return [float(loss.detach()) for loss in (value_loss, q_loss, actor_loss)]


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def _copied(module: nn.Module) -> list[nn.Module]:
    return list(copy.deepcopy(module).children())


def _module(networks: Networks, member: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(networks.weights, networks.biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[2])
        linear.weight.data, linear.bias.data = weight.detach()[member].T.clone(), bias.detach()[member, 0].clone()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_a_population_learns_as_separate_plain_modules_do() -> None:
    iql = IQL(hidden=(16, 16), learning_rate=1e-2)
    state = iql.init(spec(), [4, 5], steps=10, device=torch.device("cpu"))
    plain = [
        PlainIQL(
            iql,
            _module(state.value, p),
            [_module(state.critic, 2 * p + k) for k in range(2)],
            _module(state.actor, p),
            steps=10,
        )
        for p in range(2)
    ]
    for step in range(6):
        b = batch(2, step)
        metrics = iql.update(state, b)
        for p in range(2):
            o, a, r, next_o, d = (
                x[p] for x in (b.observations, b.actions, b.rewards, b.next_observations, b.discounts)
            )
            expected = plain[p].update(o, a, r, next_o, d)
            found = [float(metrics[name][p]) for name in ("value_loss", "q_loss", "actor_loss")]
            # float32 sums in another order, through six steps of Adam
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for p in range(2):
        torch.testing.assert_close(state.log_std.detach()[p, 0], plain[p].log_std.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            state.target.weights[1][2 * p + 1], plain[p].targets[1][2].weight.detach().T, rtol=1e-4, atol=1e-5
        )


def test_value_and_policy_lean_to_the_better_choice() -> None:
    # One state, three choices worth 0, 1 and -1, each as often: discount 0 makes Q the reward.
    iql = IQL(hidden=(32,), learning_rate=1e-2, discount=0.0, target_rate=0.2, expectile=0.9)
    state = iql.init(spec((3,)), [0], steps=1000, device=torch.device("cpu"))
    choices = torch.arange(15) % 3
    observations = torch.zeros(1, 15, 3)
    example = Batch(
        observations=observations,
        actions=functional.one_hot(choices, 3).float()[None],
        rewards=torch.tensor([0.0, 1.0, -1.0])[choices][None],
        next_observations=observations,
        discounts=torch.ones(1, 15),
    )
    for _ in range(300):
        iql.update(state, example)
    # The 0.9-expectile m of (-1, 0, 1): 0.9 (1 - m) = 0.1 m + 0.1 (m + 1), so m = 0.8 / 1.1.
    assert state.value(observations).detach()[0, 0, 0].item() == pytest.approx(0.8 / 1.1, abs=0.03)
    assert iql.policy(state).act(observations[:, :1]).tolist() == [[1]]
    # Weights exp(3 (q - m)) make the policy proportional to exp(3 q).
    probabilities = state.actor(observations)[0, 0].softmax(-1).tolist()
    total = 1 + math.exp(3) + math.exp(-3)
    assert probabilities == pytest.approx([1 / total, math.exp(3) / total, math.exp(-3) / total], abs=0.03)
