"""`optimistic`: a learned reward plus a bonus for what the labelled transitions do not cover.

ExPLORe: Li, Zhang, Ghosh, Zhang and Levine, "Accelerating exploration with unlabeled prior data" (2023). Unlabelled
transitions get R(s, a) + c |f(s, a) - g(s, a)|^2 / 256: R is learned from the labelled ones, g is a fixed random
network and f a network trained to match it on the labelled ones (random network distillation, Burda et al. 2019), so
that the bonus stays high where nothing is labelled.

The paper explores online, where the bonus is corrected by trying; in purely offline training it invites
over-estimation, so compare with `coefficient: 0` and below, which makes the labels pessimistic.

What differs from the official code: R is the ensemble of `reward_model`, stopped early, instead of one network trained
all along; inputs are standardised and say whether the task ended; known rewards are kept, as online rewards are there;
terminations are known, so there is no second network for them; labels are made once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue
from torch import Tensor

from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Evidence, LabelledTransitions
from labelers.labeler import LearningLabeler
from labelers.networks import Adam, Networks, generator
from labelers.reward_model import BLOCK, FittedRewardModel, RewardModel, blocks, standard_inputs, step_inputs

FEATURES = 256
BATCH = 256
LEARNING_RATE = 3e-4
"""All of the official configuration."""

REPORT_EVERY = 100


class Optimistic(LearningLabeler):
    """Known rewards are kept; all other steps get the learned reward plus `coefficient` times the bonus.

    rewards: which are known. coefficient: c; 1 in the paper, where rewards are 0 or -1 a step. The bonus is of size
        0.001 to 0.1, the largest where whole regions are without labels; diagnostics give its mean in each episode.
    members: networks of the reward model. hidden: widths of the hidden layers of all networks. steps: updates of the
        bonus network, each on a batch of labelled transitions, and at most as many of the reward model: the more, the
        lower the bonus near labelled transitions.
    """

    kind: Literal["optimistic"] = "optimistic"
    rewards: LabelledTransitions = LabelledTransitions()
    coefficient: float = 1.0
    members: int = Field(default=5, ge=1)
    hidden: tuple[int, ...] = (256, 256, 256)
    steps: int = Field(default=1000, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    def reward_model(self) -> RewardModel:
        """R, on (s, a)."""
        return RewardModel(
            rewards=self.rewards,
            next_observations=False,
            members=self.members,
            hidden=self.hidden,
            steps=self.steps,
            seed=self.seed,
        )

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedOptimistic:
        """Raises ConfigurationError if fewer than two episodes have a known reward."""
        assert evidence.rewards is not None
        model = self.reward_model.fit(trajectories, evidence, device=device, progress=progress)
        known = np.flatnonzero(~np.isnan(evidence.rewards))
        inputs = torch.from_numpy(standard_inputs(step_inputs(trajectories, known, False), model.input_moments)).to(
            device
        )

        sizes = (inputs.shape[1], *self.hidden, FEATURES)
        fixed = _glorot(Networks(sizes, [generator(self.seed, "fixed features")], device)).frozen()
        learned = _glorot(Networks(sizes, [generator(self.seed, "learned features")], device))
        optimiser, draw = Adam(learned.parameters(), LEARNING_RATE), generator(self.seed, "batches of the bonus")
        for step in range(1, self.steps + 1):
            batch = inputs[torch.randint(len(inputs), (BATCH,), generator=draw).to(device)][None]
            loss = bonus(learned(batch), fixed(batch)).mean()
            optimiser.step(torch.autograd.grad(loss, learned.parameters()))
            if step % REPORT_EVERY == 0:
                progress(1)
        fitted = FittedOptimistic(self, model, learned.frozen(), fixed, {})
        fitted.report.update(model.report, mean_bonus_known=float(fitted.bonus(trajectories, known).mean()))
        return fitted

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedOptimistic:
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "learned": {}, "fixed": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.to(device)
        model = self.reward_model.restore(parts["model"], report, device=device)
        return FittedOptimistic(self, model, Networks.of(parts["learned"]), Networks.of(parts["fixed"]), report)


@dataclass(eq=False)
class FittedOptimistic:
    """R, and the two networks whose difference is the bonus.

    report: that of the reward model, and `mean_bonus_known`, the mean bonus on labelled transitions.
    """

    configuration: Optimistic
    model: FittedRewardModel
    learned: Networks
    fixed: Networks
    report: dict[str, JsonValue]

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        rewards = np.full(trajectories.n_steps, np.nan, np.float32) if known is None else known.copy()
        unknown = np.flatnonzero(np.isnan(rewards))
        given = np.zeros(trajectories.n_steps)
        imputed = self.model.label(trajectories, known, progress)
        given[unknown] = self.bonus(trajectories, unknown)
        rewards[unknown] = imputed.rewards[unknown] + self.configuration.coefficient * given[unknown]
        assert imputed.diagnostics is not None
        n_imputed = trajectories.lengths - imputed.diagnostics["known"].to_numpy()
        mean_bonus = np.add.reduceat(given, trajectories.offsets[:-1]) / np.maximum(n_imputed, 1)
        return Labels(rewards, imputed.diagnostics.with_columns(pl.Series("bonus", mean_bonus)))

    @torch.no_grad()
    def bonus(self, trajectories: Trajectories, steps: np.ndarray) -> np.ndarray:
        """[n] float64, what the given steps get before `coefficient`."""
        given = np.empty(len(steps))
        for start in range(0, len(steps), BLOCK):
            inputs = step_inputs(trajectories, steps[start : start + BLOCK], False)
            for rows, block in blocks(inputs, self.model.input_moments, self.fixed.weights[0].device):
                found = bonus(self.learned(block[None]), self.fixed(block[None]))[0]
                given[start + rows.start : start + rows.stop] = found[: len(inputs)].double().cpu().numpy()
        return given

    def state(self) -> dict[str, Tensor]:
        parts = {"model": self.model.state(), "learned": self.learned.state_dict(), "fixed": self.fixed.state_dict()}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def bonus(learned: Tensor, fixed: Tensor) -> Tensor:
    """[..., n] mean over features of (learned - fixed)^2, both [..., n, features]. Its mean trains `learned`."""
    return (learned - fixed).square().mean(-1)


@torch.no_grad()
def _glorot(networks: Networks) -> Networks:
    """Weights uniform in +-sqrt(6 / (in + out)) and biases 0, in place, as in the official code: the size of the bonus,
    and so the meaning of `coefficient`, hangs on it (PyTorch's own would make it about a hundred times smaller)."""
    for weight, bias in zip(networks.weights, networks.biases, strict=True):
        _, n_in, n_out = weight.shape
        weight.mul_((6 * n_in / (n_in + n_out)) ** 0.5)
        bias.zero_()
    return networks
