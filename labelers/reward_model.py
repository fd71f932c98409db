"""`reward_model`: rewards known for a few transitions, learned by an ensemble and imputed to all others.

After Romeo and Bagdanov, "Offline reinforcement learning with imputed rewards" (2024): a network trained on the 1 % of
transitions whose reward is known says what the other 99 % are worth. Theirs is one network; here it is an ensemble of
bootstrapped ones, stopped early on held-out episodes, which also says how unsure it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue
from torch import Tensor

from data.config import Config
from data.errors import ConfigurationError
from data.labels import Labels
from data.progress import Progress, silent
from data.statistics import Moments, moments_of, standardise
from data.trajectories import Trajectories
from labelers.evidence import Evidence, LabelledTransitions
from labelers.labeler import LearningLabeler
from labelers.networks import Adam, Best, Networks, generator
from labelers.quality import correlation

BATCH = 128
LEARNING_RATE = 2e-3
HELD_OUT = 0.1
CHECK_EVERY = 100
PATIENCE = 5
"""Checks in a row without a better held-out error, for every member, after which training stops."""

BLOCK = 1024
"""Rows that a network sees at once when labelling. Always as many, so that what a row is worth does not depend on how
many others come with it, to the last bit."""


class RewardModel(LearningLabeler):
    """Learn rewards from (s, a) or (s, a, s'), impute mean - pessimism * std of the ensemble, keep known rewards.

    That the task ended with a step is an input too: the data says so, and rewards often jump there. Where the next
    observation was not recorded, the last one that was stands in for it, in training and in labelling alike; the
    diagnostics name these episodes (`next_unknown`).

    rewards: which are known. next_observations: whether s' is an input: rewards of a simulator are often exact
        functions of it. members: size of the ensemble. hidden: widths of the hidden layers. steps: at most so many
        updates. pessimism: how many standard deviations (between members) to take off (Hu et al. 2023).
    Imputed rewards are kept inside the range of the known ones.
    """

    kind: Literal["reward_model"] = "reward_model"
    rewards: LabelledTransitions = LabelledTransitions()
    next_observations: bool = True
    members: int = Field(default=5, ge=1)
    hidden: tuple[int, ...] = (256, 256)
    steps: int = Field(default=1000, ge=1)
    pessimism: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedRewardModel:
        """Held out are all known rewards of a tenth of the episodes that have any.

        Raises ConfigurationError if fewer than two episodes have a known reward.
        """
        assert evidence.rewards is not None
        known = np.flatnonzero(~np.isnan(evidence.rewards))
        episode = trajectories.episode_index[known]
        episodes = np.unique(episode)
        if len(episodes) < 2:
            raise ConfigurationError(
                f"reward_model: {len(known):,} known rewards in {len(episodes)} episode(s). Some episodes are "
                "held out to know when to stop, so at least two must have known rewards: raise `fraction`."
            )
        drawn = np.random.default_rng([self.seed, 1]).permutation(episodes)
        drawn = drawn[: max(1, round(HELD_OUT * len(drawn)))]
        test = np.isin(episode, drawn)
        inputs = step_inputs(trajectories, known, self.next_observations)
        rewards = evidence.rewards[known].astype(np.float64)

        input_moments, reward_moments = moments_of(inputs[~test]), moments_of(rewards[~test])
        mean, std = float(reward_moments.mean[0]), float(reward_moments.scale[0])
        standard = torch.from_numpy(standard_inputs(inputs, input_moments)).to(device)
        target = torch.from_numpy(((rewards - mean) / std).astype(np.float32)).to(device)
        train = torch.from_numpy(~test).to(device)
        networks, best_step = self._train(standard[train], target[train], standard[~train], target[~train], progress)
        fitted = FittedRewardModel(
            configuration=self,
            networks=networks,
            input_moments=input_moments,
            reward_mean=mean,
            reward_std=std,
            low=float(rewards.min()),
            high=float(rewards.max()),
            report={},
        )
        found = held_out(*fitted.predict(inputs[test]), rewards[test], mean, len(drawn))
        fitted.report.update(known=len(known), best_step=best_step, held_out=found.model_dump())
        if fitted.low == fitted.high:
            warnings.warn(
                f"reward_model: every known reward is {fitted.low:.6g}, and so is every imputed one. Where rewards are "
                "rare, label more transitions (`fraction`).",
                stacklevel=2,
            )
        elif found.rmse >= found.rmse_of_mean:
            warnings.warn(
                f"reward_model: the root mean square error on held-out episodes is {found.rmse:.4g}, that of always "
                f"saying the mean {found.rmse_of_mean:.4g}: nothing was learned. Label more transitions (`fraction`).",
                stacklevel=2,
            )
        return fitted

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedRewardModel:
        numbers = {name: state[name].cpu().numpy() for name in ("inputs", "constant", "rewards")}
        mean, std, minimum, maximum = numbers["inputs"]
        count, reward_mean, reward_std, low, high = numbers["rewards"].tolist()
        networks = Networks.of(
            {n.removeprefix("network."): t.to(device) for n, t in state.items() if n.startswith("network.")}
        )
        if networks.sizes != (len(mean), *self.hidden, 1) or networks.n_networks != self.members:
            raise ValueError(f"{networks.n_networks} networks of {networks.sizes}")
        moments = Moments(int(count), mean, std, minimum, maximum, numbers["constant"])
        return FittedRewardModel(self, networks, moments, reward_mean, reward_std, low, high, report)

    def _train(
        self, inputs: Tensor, targets: Tensor, test_inputs: Tensor, test_targets: Tensor, progress: Progress
    ) -> tuple[Networks, list[JsonValue]]:
        """The members, each with the weights of its smallest held-out error, and the steps at which they had them.

        inputs: [n, D] standardised. targets: [n] standardised. Every member has its own bootstrap sample and batches.
        """
        starts = [generator(self.seed, f"initialisation of member {m}") for m in range(self.members)]
        draws = [generator(self.seed, f"batches of member {m}") for m in range(self.members)]
        n, everyone = len(inputs), torch.arange(self.members)[:, None]
        networks = Networks((inputs.shape[1], *self.hidden, 1), starts, inputs.device)
        optimiser = Adam(networks.parameters(), LEARNING_RATE, decay_steps=self.steps)
        samples = torch.stack([torch.randint(n, (n,), generator=draw) for draw in draws])
        best = Best(networks, self.members, PATIENCE * CHECK_EVERY, inputs.device)
        for step in range(1, self.steps + 1):
            places = torch.stack([torch.randint(n, (BATCH,), generator=draw) for draw in draws])
            rows = samples[everyone, places].to(inputs.device)
            loss = (networks(inputs[rows]).squeeze(-1) - targets[rows]).square().mean(1).sum()
            optimiser.step(torch.autograd.grad(loss, networks.parameters()))
            if step % CHECK_EVERY == 0 or step == self.steps:
                with torch.no_grad():
                    said = networks(test_inputs.expand(self.members, -1, -1)).squeeze(-1)
                progress(1)
                if best.look(step, networks, (said - test_targets).square().mean(1)):
                    break
        return best.networks, best.steps.tolist()


@dataclass(eq=False)
class FittedRewardModel:
    """An ensemble and what standardises it.

    input_moments: of the rows trained on. reward_mean, reward_std: of their rewards. low, high: range of all known
    rewards. report: counts and `HeldOut`.
    """

    configuration: RewardModel
    networks: Networks
    input_moments: Moments
    reward_mean: float
    reward_std: float
    low: float
    high: float
    report: dict[str, JsonValue]

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        """Known rewards as they are; for the others what the ensemble says, within the known range."""
        rewards = np.full(trajectories.n_steps, np.nan, np.float32) if known is None else known.copy()
        unknown = np.flatnonzero(np.isnan(rewards))
        std = np.zeros(trajectories.n_steps)
        finished = 0
        for start in range(0, len(unknown), BLOCK):
            steps = unknown[start : start + BLOCK]
            mean, std[steps] = self.predict(step_inputs(trajectories, steps, self.configuration.next_observations))
            rewards[steps] = np.clip(mean - self.configuration.pessimism * std[steps], self.low, self.high)
            reached = int(trajectories.episode_index[steps[-1]])
            progress(reached - finished)
            finished = reached
        progress(trajectories.n_episodes - finished)
        imputed = np.bincount(trajectories.episode_index[unknown], minlength=trajectories.n_episodes)
        total = np.add.reduceat(std, trajectories.offsets[:-1])
        diagnostics = {"known": trajectories.lengths - imputed, "ensemble_std": total / np.maximum(imputed, 1)}
        if self.configuration.next_observations:
            diagnostics["next_unknown"] = ~trajectories.final_observed
        return Labels(rewards, pl.DataFrame(diagnostics))

    @torch.no_grad()
    def predict(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over members, [n] float64 each, in the units of the rewards.

        inputs: [n, D] of `step_inputs`.
        """
        outputs = np.empty((self.configuration.members, len(inputs)))
        for rows, block in blocks(inputs, self.input_moments, self.networks.weights[0].device):
            said = self.networks(block.expand(self.configuration.members, -1, -1)).squeeze(-1)
            outputs[:, rows] = said[:, : rows.stop - rows.start].double().cpu().numpy()
        return self.reward_mean + self.reward_std * outputs.mean(0), self.reward_std * outputs.std(0)

    def state(self) -> dict[str, Tensor]:
        moments = self.input_moments
        inputs = np.stack([moments.mean, moments.std, moments.minimum, moments.maximum])
        rewards = np.array([moments.count, self.reward_mean, self.reward_std, self.low, self.high])
        return {
            "inputs": torch.from_numpy(inputs),
            "constant": torch.from_numpy(moments.constant),
            "rewards": torch.from_numpy(rewards),
            **{f"network.{name}": tensor for name, tensor in self.networks.state_dict().items()},
        }


class HeldOut(Config):
    """How good predictions are, and how honest their standard deviations, on rewards that were not trained on.

    n, n_episodes: how many, of how many episodes. rmse, rmse_of_mean: root mean square error, and that of always saying
        the mean of the rewards trained on. pearson: None if undefined.
    z_rms: root mean square of (reward - mean) / std; 1 if calibrated, above 1 if the ensemble is too sure.
    within_2_std: share of rewards closer than two std; .954 if calibrated. Both None if the members agree exactly.
    The same rewards decide when training stops, so the errors are a little flattering.
    """

    n: int
    n_episodes: int
    rmse: float
    rmse_of_mean: float
    pearson: float | None
    z_rms: float | None
    within_2_std: float | None


def held_out(mean: np.ndarray, std: np.ndarray, rewards: np.ndarray, baseline: float, n_episodes: int) -> HeldOut:
    """mean, std, rewards: [n] float64, predicted and known. baseline: the mean of the rewards trained on."""
    error = rewards - mean
    spread = bool((std > 0).all())
    return HeldOut(
        n=len(rewards),
        n_episodes=n_episodes,
        rmse=float(np.sqrt(np.mean(error**2))),
        rmse_of_mean=float(np.sqrt(np.mean((rewards - baseline) ** 2))),
        pearson=correlation(mean, rewards).pearson,
        z_rms=float(np.sqrt(np.mean((error / std) ** 2))) if spread else None,
        within_2_std=float(np.mean(np.abs(error) <= 2 * std)) if spread else None,
    )


def step_inputs(trajectories: Trajectories, steps: np.ndarray, next_observations: bool) -> np.ndarray:
    """[n, D] observation, action, next observation if asked for, and 1 where the task ended, flattened, side by side.

    Actions are those of `action_columns`. Where the next observation was not recorded, the observation stands in its
    place (see `Trajectories`).
    """
    rows = trajectories.observation_rows(steps)
    columns = [trajectories.observations[rows], action_columns(trajectories, steps)]
    if next_observations:
        columns.append(trajectories.observations[rows + 1])
    columns.append((~trajectories.continues[steps]).astype(np.float32))
    return np.concatenate([c.reshape(len(steps), -1) for c in columns], axis=1)


def action_columns(trajectories: Trajectories, steps: np.ndarray) -> np.ndarray:
    """[n, A] actions, flattened; discrete ones are one-hot, one block for each action dimension."""
    actions = trajectories.actions[steps].reshape(len(steps), math.prod(trajectories.actions.shape[1:]))
    if trajectories.n_actions is None:
        return actions
    choices = [np.eye(n, dtype=np.float32)[column] for n, column in zip(trajectories.n_actions, actions.T, strict=True)]
    return np.concatenate(choices, axis=1)


def standard_inputs(inputs: np.ndarray, moments: Moments) -> np.ndarray:
    """[n, D] float32, standardised and cut at +-5: a rare flag or an outlier is not to drown the other columns."""
    standard: np.ndarray = np.clip(standardise(inputs, moments), -5, 5)
    return standard


def blocks(inputs: np.ndarray, moments: Moments, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `inputs` [n, D], standardised, in blocks [BLOCK, D] of which the last is filled up with zeros."""
    for start in range(0, len(inputs), BLOCK):
        rows = slice(start, min(start + BLOCK, len(inputs)))
        block = np.zeros((BLOCK, inputs.shape[1]), np.float32)
        block[: rows.stop - start] = standard_inputs(inputs[rows], moments)
        yield rows, torch.from_numpy(block).to(device)
