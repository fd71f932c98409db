"""`inverse_dynamics`: actions known for a few episodes, learned from how observations follow each other, for the rest.

SS-ORL: Zheng, Henaff, Amos and Grover, "Semi-supervised offline reinforcement learning with action-free trajectories"
(2023). A multi-step stochastic inverse dynamics model p(a_t | s_{t-k} .. s_{t+1}) is trained by likelihood on the
trajectories that have actions; the others get the mean of its ensemble as proxy actions. Labels are actions here, not
rewards.

What differs from the official code: the observations are given as s_t and the changes that led to it and follow, the
same numbers in other coordinates, since actions show in changes that are small beside the state; an episode's first
observation is repeated before its start, instead of zeros that standardising turns into some state; the true next
observation is used, also at an episode's end; actions at +-1 do not become infinite; the weights of the best held-out
likelihood really are kept, after training as long as it helps instead of 100 updates; proxies really are clipped;
networks are a quarter as wide by default; and evidence says which episodes are labelled (`LabelledActions`), drawn from
all and not from the lowest returns. Discrete actions are ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue
from torch import Tensor

from data.errors import ConfigurationError
from data.labels import ActionLabels
from data.progress import Progress, silent
from data.statistics import Moments, MomentsOf
from data.trajectories import Trajectories
from labelers.action_models import ActionModel, Choices, SquashedGaussian, explained_variance, restored
from labelers.evidence import Evidence, LabelledActions
from labelers.labeler import LearningLabeler
from labelers.networks import Adam, Best, Networks, generator
from labelers.reward_model import BLOCK, blocks, standard_inputs

BATCH = 256
LEARNING_RATE = 1e-3
DROPOUT = 0.1
"""Part of the hidden units left out in each update, as in the official code; without it the likelihood of held-out
episodes falls after a few hundred updates."""

HELD_OUT = 0.1
CHECK_EVERY = 100
PATIENCE = 5
"""Checks in a row without a better held-out likelihood, for every member, after which training stops."""

POOR = 0.5
"""Part of the held-out actions explained, below which a warning is given."""

LATE = 0.05
"""Part of the actions by which a linear model must explain more after moving them, to say that they are late. In twelve
MuJoCo and maze datasets it explains at least 0.02 less."""

LINEAR_STEPS, LINEAR_COLUMNS = 20_000, 1_000
"""Largest least-squares problem that is a quick check."""


class InverseDynamics(LearningLabeler):
    """Learn which action leads from one observation to the next, say it where actions are not known, keep known ones.

    The model sees s_{t-k} .. s_{t+1}, standardised over all data, with or without actions (see `windows`); before an
    episode's start its first observation is repeated, a change of 0. Where the observation after the last step was not
    recorded there is no s_{t+1}: known actions of such steps are not trained on (`next_unknown` in the report says how
    many), and an unknown one is that of the model with the last observation repeated, a guess that the diagnostics
    count (`next_unknown`).

    actions: of which episodes they are known. past_transitions: k. members: size of the ensemble. hidden: widths of
        the hidden layers. steps: at most so many updates.
    Proxy actions stay inside the declared bounds, else inside the range of the known actions.
    """

    column: ClassVar[Literal["rewards", "actions"]] = "actions"
    kind: Literal["inverse_dynamics"] = "inverse_dynamics"
    actions: LabelledActions = LabelledActions()
    past_transitions: int = Field(default=1, ge=0)
    members: int = Field(default=3, ge=1)
    hidden: tuple[int, ...] = (256, 256)
    steps: int = Field(default=2000, ge=1)
    seed: int = Field(default=0, ge=0)

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedInverseDynamics:
        """Held out is a tenth of the episodes that have known actions.

        Raises ConfigurationError if fewer than two episodes have a known action with a next observation.
        """
        assert evidence.actions is not None
        known = known_steps(evidence.actions, trajectories.n_actions)
        usable = np.flatnonzero(known & next_observed(trajectories))
        episode = trajectories.episode_index[usable]
        episodes = np.unique(episode)
        if len(episodes) < 2:
            raise ConfigurationError(
                f"inverse_dynamics: {len(usable):,} known actions with a next observation, in {len(episodes)} "
                "episode(s). Some episodes are held out to know when to stop, so at least two must have known actions: "
                "raise `fraction`."
            )
        drawn = np.random.default_rng([self.seed, 1]).permutation(episodes)
        drawn = drawn[: max(1, round(HELD_OUT * len(drawn)))]
        test = np.isin(episode, drawn)
        actions = evidence.actions[usable]

        moments = window_moments(trajectories, self.past_transitions)
        seen = windows(trajectories, usable, self.past_transitions)
        inputs = torch.from_numpy(standard_inputs(seen, moments)).to(device)
        model = action_model(trajectories, actions)
        targets = torch.from_numpy(model.encode(actions)).to(device)
        train = torch.from_numpy(~test).to(device)
        networks, best_step = self._train(
            model, inputs[train], targets[train], inputs[~train], targets[~train], progress
        )
        with torch.no_grad():
            outputs = networks(inputs[~train].expand(networks.n_networks, -1, -1))
        found = model.judge(outputs, actions[test], len(drawn))
        as_they_are, one_row_up = alignment(trajectories, evidence.actions)
        report: dict[str, JsonValue] = {
            "known": int(known.sum()),
            "next_unknown": int(known.sum()) - len(usable),
            "best_step": best_step,
            "held_out": found.model_dump(mode="json"),
            "linear_r2": as_they_are,
            "linear_r2_one_row_up": one_row_up,
        }
        if (advice := doubt(found.explained, as_they_are, one_row_up)) is not None:
            warnings.warn(f"inverse_dynamics: {advice}", stacklevel=2)
        return FittedInverseDynamics(self, model, networks, moments, report)

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedInverseDynamics:
        model = restored(state)
        mean, std, minimum, maximum = state["inputs"].cpu().numpy()
        moments = Moments(int(state["count"]), mean, std, minimum, maximum, state["constant"].cpu().numpy())
        networks = Networks.of(
            {n.removeprefix("network."): t.to(device) for n, t in state.items() if n.startswith("network.")}
        )
        sizes = (len(mean), *self.hidden, model.n_outputs)
        if networks.sizes != sizes or networks.n_networks != self.members * model.networks_per_member:
            raise ValueError(f"{networks.n_networks} networks of {networks.sizes}")
        return FittedInverseDynamics(self, model, networks, moments, report)

    def _train(
        self,
        model: ActionModel,
        inputs: Tensor,
        targets: Tensor,
        test_inputs: Tensor,
        test_targets: Tensor,
        progress: Progress,
    ) -> tuple[Networks, list[JsonValue]]:
        """The members, each with the weights of its largest held-out likelihood, and the steps at which they had them.

        inputs: [n, W] windows. targets: [n, n_outputs] encoded actions. Every member has its own batches.
        """
        starts = [generator(self.seed, f"initialisation of member {m}") for m in range(self.members)]
        draws = [generator(self.seed, f"batches of member {m}") for m in range(self.members)]
        each = model.networks_per_member
        networks = Networks((inputs.shape[1], *self.hidden, model.n_outputs), starts * each, inputs.device)
        optimiser = Adam(networks.parameters(), LEARNING_RATE, decay_steps=self.steps)
        best = Best(networks, self.members, PATIENCE * CHECK_EVERY, inputs.device)
        for step in range(1, self.steps + 1):
            rows = torch.stack([torch.randint(len(inputs), (BATCH,), generator=draw) for draw in draws])
            rows = rows.to(inputs.device)
            outputs = with_dropout(networks, inputs[rows].repeat(each, 1, 1), draws)
            loss = -model.log_probability(outputs, targets[rows]).mean(1).sum()
            optimiser.step(torch.autograd.grad(loss, networks.parameters()))
            if step % CHECK_EVERY == 0 or step == self.steps:
                with torch.no_grad():
                    said = networks(test_inputs.expand(networks.n_networks, -1, -1))
                likelihood = model.log_probability(said, test_targets[None]).mean(1)
                progress(1)
                if best.look(step, networks, -likelihood, each):
                    break
        return best.networks, best.steps.tolist()


@dataclass(eq=False)
class FittedInverseDynamics:
    """An ensemble, how its outputs are read, and what standardises its inputs.

    input_moments: of all windows. report: counts, the step each member had its best weights at, `HeldOut`, and how well
    a linear model fits the known actions as they are and moved one row up (`alignment`).
    """

    configuration: InverseDynamics
    model: ActionModel
    networks: Networks
    input_moments: Moments
    report: dict[str, JsonValue]

    def label(
        self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent
    ) -> ActionLabels:
        """Known actions as they are, proxies for the others.

        Diagnostics: `known`, how many are; `uncertainty`, mean over the proxies of an episode and their dimensions of
        the predicted variance (half the action range being 1) or, of discrete actions, of the probability of another
        choice; `next_unknown`, how many proxies were made without a next observation, from the last one repeated.
        """
        theirs = trajectories.actions
        actions = np.zeros(theirs.shape, theirs.dtype) if known is None else known.copy()
        unknown = np.arange(len(actions))
        if known is not None:
            unknown = np.flatnonzero(~known_steps(known, trajectories.n_actions))
        uncertainty = np.zeros(trajectories.n_steps)
        finished = 0
        for start in range(0, len(unknown), BLOCK):
            steps = unknown[start : start + BLOCK]
            proxies, unsure = self.predict(trajectories, steps)
            actions[steps] = proxies.astype(theirs.dtype).reshape(len(steps), *theirs.shape[1:])
            uncertainty[steps] = unsure.mean(1)
            reached = int(trajectories.episode_index[steps[-1]])
            progress(reached - finished)
            finished = reached
        progress(trajectories.n_episodes - finished)

        def per_episode(steps: np.ndarray) -> np.ndarray:
            return np.bincount(trajectories.episode_index[steps], minlength=trajectories.n_episodes)

        n_proxies = per_episode(unknown)
        diagnostics = {
            "known": trajectories.lengths - n_proxies,
            "uncertainty": np.add.reduceat(uncertainty, trajectories.offsets[:-1]) / np.maximum(n_proxies, 1),
            "next_unknown": per_episode(unknown[~next_observed(trajectories)[unknown]]),
        }
        return ActionLabels(actions, pl.DataFrame(diagnostics))

    @torch.no_grad()
    def predict(self, trajectories: Trajectories, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Proxy actions of at most BLOCK steps and how unsure they are, [n, A] float64 each: see `ActionModel`."""
        seen = windows(trajectories, steps, self.configuration.past_transitions)
        ((_, block),) = blocks(seen, self.input_moments, self.networks.weights[0].device)
        outputs = self.networks(block.expand(self.networks.n_networks, -1, -1))
        proxies, unsure = self.model.predict(outputs)
        return proxies[: len(steps)], unsure[: len(steps)]

    def state(self) -> dict[str, Tensor]:
        moments = self.input_moments
        return {
            "inputs": torch.from_numpy(np.stack([moments.mean, moments.std, moments.minimum, moments.maximum])),
            "count": torch.tensor(moments.count),
            "constant": torch.from_numpy(moments.constant),
            **self.model.state(),
            **{f"network.{name}": tensor for name, tensor in self.networks.state_dict().items()},
        }


def known_steps(actions: np.ndarray, n_actions: tuple[int, ...] | None) -> np.ndarray:
    """[N] bool, where actions [N, ...] are known: not NaN, or not -1 if discrete. See `Evidence.actions`."""
    rows = actions.reshape(len(actions), -1)
    known: np.ndarray = np.all(~np.isnan(rows) if n_actions is None else rows >= 0, axis=1)
    return known


def next_observed(trajectories: Trajectories) -> np.ndarray:
    """[N] bool, whether the observation after each step is known."""
    observed = np.ones(trajectories.n_steps, bool)
    observed[trajectories.offsets[1:][~trajectories.final_observed] - 1] = False
    return observed


def windows(trajectories: Trajectories, steps: np.ndarray, past: int) -> np.ndarray:
    """What s_{t-past} .. s_{t+1} say: s_t, then the changes between neighbours, oldest first.

    Changes from before an episode's first observation are 0, and so is the one to a next observation that was not
    recorded. steps: [n]. Returns [n, (past + 2) * D] float, for D numbers in an observation.
    """
    episode = trajectories.episode_index[steps]
    first = (trajectories.offsets[episode] + episode)[:, None]
    rows = np.maximum((steps + episode)[:, None] + np.arange(-past, 2), first)
    seen = trajectories.observations[rows].reshape(*rows.shape, -1)
    seen = seen.astype(np.result_type(seen.dtype, np.float32), copy=False)
    window: np.ndarray = np.concatenate([seen[:, [past]], np.diff(seen, axis=1)], axis=1).reshape(len(steps), -1)
    return window


def window_moments(trajectories: Trajectories, past: int) -> Moments:
    """Moments of the windows of all steps whose next observation is known; at least one.

    Changes of a column that is constant but for rounding are rounding, and count as constant too.
    """
    steps, accumulated = np.flatnonzero(next_observed(trajectories)), MomentsOf()
    for start in range(0, len(steps), BLOCK):
        accumulated.update(windows(trajectories, steps[start : start + BLOCK], past))
    moments = accumulated.moments()
    by_place = moments.constant.reshape(past + 2, -1)
    constant = (by_place | by_place[0]).reshape(-1)
    return replace(moments, constant=constant, std=np.where(constant, 0.0, moments.std))


def with_dropout(networks: Networks, inputs: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
    """What `networks` say with `DROPOUT` of their hidden units left out, others for every row, the rest made up for.

    inputs: [P, B, in]. draws: M generators on the CPU, one for every member; P is a multiple of M, and network p is of
    member p modulo M. Returns [P, B, out]. Srivastava et al. 2014.
    """
    each, batch = networks.n_networks // len(draws), inputs.shape[1]
    hidden = inputs
    for weight, bias in zip(networks.weights[:-1], networks.biases[:-1], strict=True):
        shape = (each, batch, weight.shape[-1])
        kept = torch.stack([torch.empty(shape).bernoulli_(1 - DROPOUT, generator=draw) for draw in draws], dim=1)
        hidden = torch.baddbmm(bias, hidden, weight).relu() * (kept.flatten(0, 1).to(hidden.device) / (1 - DROPOUT))
    return torch.baddbmm(networks.biases[-1], hidden, networks.weights[-1])


def action_model(trajectories: Trajectories, actions: np.ndarray) -> ActionModel:
    """What fits the kind of actions. actions: [n, ...] the known ones, whose range counts where none is declared."""
    if trajectories.n_actions is not None:
        return Choices(trajectories.n_actions)
    rows = actions.reshape(len(actions), -1).astype(np.float64)
    if trajectories.action_bounds is None:
        return SquashedGaussian(rows.min(0), rows.max(0))
    low, high = trajectories.action_bounds
    return SquashedGaussian(np.full(rows.shape[1], low), np.full(rows.shape[1], high))


def alignment(trajectories: Trajectories, actions: np.ndarray) -> tuple[float | None, float | None]:
    """How well changes of the observation explain known actions: as they are, and moved one row up in each episode.

    actions: [N, ...] as in `Evidence.actions`. Returns R2 of least squares with an intercept on the steps fitted, at
    most `LINEAR_STEPS` of them; discrete actions are one-hot. None where there are not twice as many steps as columns,
    or more columns than `LINEAR_COLUMNS`.
    """
    known = known_steps(actions, trajectories.n_actions)
    last = np.zeros(trajectories.n_steps, bool)
    last[trajectories.offsets[1:] - 1] = True
    as_they_are = np.flatnonzero(known & next_observed(trajectories))
    one_row_up = np.flatnonzero(~last[:-1] & known[1:])
    return (
        _linear_r2(trajectories, as_they_are, actions, as_they_are),
        _linear_r2(trajectories, one_row_up, actions, one_row_up + 1),
    )


def _linear_r2(
    trajectories: Trajectories, change_steps: np.ndarray, actions: np.ndarray, action_steps: np.ndarray
) -> float | None:
    """R2 of a linear model from the changes at some steps to the actions of as many others, row by row."""
    stride = -(-len(change_steps) // LINEAR_STEPS) or 1
    rows = trajectories.observation_rows(change_steps[::stride])
    n_columns = math.prod(trajectories.observations.shape[1:]) + 1
    if n_columns > min(LINEAR_COLUMNS, len(rows) / 2):
        return None
    now, then = (trajectories.observations[r].reshape(len(rows), -1).astype(np.float64) for r in (rows, rows + 1))
    design = np.column_stack([then - now, np.ones(len(rows))])
    targets = actions[action_steps[::stride]].reshape(len(rows), -1)
    if trajectories.n_actions is not None:
        targets = Choices(trajectories.n_actions).encode(targets)
    targets = targets.astype(np.float64)
    return explained_variance(targets - design @ np.linalg.lstsq(design, targets)[0], targets)


def doubt(explained: float | None, as_they_are: float | None, one_row_up: float | None) -> str | None:
    """What is wrong with the known actions or the labels, as far as can be seen, and what to do; None if nothing is.

    explained: `HeldOut.explained`. as_they_are, one_row_up: from `alignment`. Late actions are foretold well by a model
    that sees the past, and its proxies are late too: so a good `explained` says nothing against it.
    """
    poor = None
    if explained is not None and explained < POOR:
        poor = f"only {explained:.2f} of the actions of held-out episodes (1 is all of what varies) is foretold"
    remedy = "Observations may not show what was done, or more episodes must have known actions (`fraction`)."
    if as_they_are is None or one_row_up is None:
        return poor and f"{poor}. {remedy}"
    fits = (
        f"a linear model explains {as_they_are:.2f} of the known actions, and {one_row_up:.2f} of them moved one row "
        "up inside each episode"
    )
    if one_row_up - as_they_are > LATE:
        return (
            f"actions seem to be recorded one row late: {fits}. Proxies will be late as well. Move the actions up, "
            "leave out each episode's last step, and read the dataset again."
        )
    return poor and f"{poor}. Actions do not seem to be recorded one row late: {fits}. {remedy}"
