"""Member-steps a second of IQL: separate plain modules one after the other, and stacked populations of 1, 3 and 9.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/training.py [--rounds 8] [--device cpu]

All are run in turns, round after round, so that whatever else the machine does falls on each alike. Sizes are those of
IQL on hopper: 11 observations, 3 actions, batch 256, networks 2 x 256.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms import IQL
from algorithms.algorithm import Batch
from algorithms.spec import Spec
from algorithms.training import settled

N_OBSERVATIONS, N_ACTIONS, BATCH = 11, 3, 256
POPULATIONS = (1, 3, 9)
SECONDS = 1.0


def batch_of(n_members: int, device: torch.device) -> Batch:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(n_members, BATCH, *shape, generator=source).to(device)

    return Batch(draw(N_OBSERVATIONS), draw(N_ACTIONS).tanh(), draw(), draw(N_OBSERVATIONS), torch.ones_like(draw()))


class Plain:
    """One member as it is usually written: a module a network, PyTorch's Adam with its defaults."""

    def __init__(self, device: torch.device) -> None:
        def network(n_in: int, n_out: int) -> nn.Sequential:
            layers = [nn.Linear(n_in, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_out)]
            return nn.Sequential(*layers).to(device)

        self.value, self.actor = network(N_OBSERVATIONS, 1), network(N_OBSERVATIONS, N_ACTIONS)
        self.critics = nn.ModuleList(network(N_OBSERVATIONS + N_ACTIONS, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_std = nn.Parameter(torch.zeros(N_ACTIONS, device=device))
        learned = (self.value.parameters(), self.critics.parameters(), [*self.actor.parameters(), self.log_std])
        self.optimisers = [torch.optim.Adam(parameters, lr=3e-4) for parameters in learned]

    def update(self, batch: Batch) -> None:
        observations, actions = batch.observations[0], batch.actions[0]
        pairs = torch.cat([observations, actions], dim=1)
        with torch.no_grad():
            target_q = torch.minimum(*(target(pairs)[:, 0] for target in self.targets))
            backup = batch.rewards[0] + 0.99 * batch.discounts[0] * self.value(batch.next_observations[0])[:, 0]
        advantage = target_q - self.value(observations)[:, 0]
        value_loss = (torch.where(advantage < 0, 0.3, 0.7) * advantage.square()).mean()
        q_loss = sum(functional.mse_loss(critic(pairs)[:, 0], backup) for critic in self.critics)
        density = torch.distributions.Normal(self.actor(observations).tanh(), self.log_std.clamp(-20, 2).exp())
        weight = (3 * advantage.detach()).exp().clamp(max=100)
        actor_loss = -(weight * density.log_prob(actions).sum(1)).mean()
        for optimiser, loss in zip(self.optimisers, (value_loss, q_loss, actor_loss), strict=True):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            for target, critic in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(critic, 0.005)


def stacked(n_members: int, device: torch.device) -> Callable[[], object]:
    shape, bound = np.zeros(N_OBSERVATIONS), np.ones(N_ACTIONS, np.float32)
    spec = Spec((N_OBSERVATIONS,), (N_ACTIONS,), None, shape, shape + 1, -bound, bound)
    algorithm, batch = IQL(), batch_of(n_members, device)
    state = algorithm.init(spec, range(n_members), 1_000_000, device)
    return lambda: algorithm.update(state, batch)


def plain(device: torch.device) -> Callable[[], object]:
    member, batch = Plain(device), batch_of(1, device)
    return lambda: member.update(batch)


def rate(step: Callable[[], object], n_members: int, device: torch.device) -> float:
    """Member-steps a second over about a second."""
    n_steps, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < SECONDS:
        step()
        n_steps += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return n_steps * n_members / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    runs = {"separate modules": (plain(device), 1)}
    runs |= {f"stacked, P = {p}": (stacked(p, device), p) for p in POPULATIONS}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    with settled():
        for step, _ in runs.values():
            for _ in range(3):
                step()
        for _ in range(asked.rounds):
            for name, (step, n_members) in runs.items():
                rates[name].append(rate(step, n_members, device))
        threads = torch.get_num_threads()
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {device}, {threads} threads, {asked.rounds} rounds; load average {load:.1f}")
    print(f"{'member-steps/s':<18} {'median':>7} {'lowest':>7} {'highest':>7} {'of separate':>12}")
    base = statistics.median(rates["separate modules"])
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:<18} {middle:7.0f} {min(found):7.0f} {max(found):7.0f} {middle / base:11.2f}x")


if __name__ == "__main__":
    main()
