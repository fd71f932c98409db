"""`preference`: rewards under which the segments that somebody preferred are worth more.

Christiano et al., "Deep reinforcement learning from human preferences" (2017): of two segments the first is better with
probability sigmoid(sum of its rewards - sum of the other's) (Bradley and Terry 1952), and an ensemble is trained to say
so of the stated preferences; a tie is a probability of one half. `model: transformer` lets a reward depend on the steps
before it (Kim et al., "Preference Transformer", 2023). Members are put on one scale before they are averaged (Tu et
al., "DTR", 2024).

What preferences cannot say: segments of one length are compared, so rewards are known up to a constant, and that
decides whether an episode that ends early lost anything by it. `zero` chooses the constant.

What differs from the official codes: no tanh at the end, which caps how much a step can matter; the best weights on
held-out pairs are kept instead of those after a number of epochs; that the task ended with a step is an input.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import polars as pl
import torch
from pydantic import Field, JsonValue, model_validator
from torch import Tensor

from data.config import Config
from data.errors import ConfigurationError
from data.findings import Severity
from data.labels import Labels
from data.progress import Progress, silent
from data.statistics import Moments, moments_of
from data.trajectories import Trajectories
from labelers.evidence import Evidence, Preferences
from labelers.labeler import LearningLabeler
from labelers.networks import Adam, Best, generator
from labelers.preferences import Annotator, AnyPreferences
from labelers.reward_model import standard_inputs, step_inputs
from labelers.segment_models import HEADS, AttentionModel, SegmentModel, StepModel, bradley_terry_loss

BATCH = 64
"""Pairs in an update, as in DTR."""

LEARNING_RATE = 2e-3
HELD_OUT = 0.1
CHECK_EVERY = 10
PATIENCE = 10
"""Checks in a row without a better held-out loss, for every member, after which training stops."""

BLOCK = 1024
"""Steps that a network sees at once when labelling, those before the one asked for counted; always as many, so that a
label does not depend on how many others are made with it, to the last bit."""

BINS = 5
SHOWN = 10


class Preference(LearningLabeler):
    """Learn rewards from preferences between segments, average the ensemble.

    preferences: who prefers what. model: `mlp`, a reward of (s, a) alone; `transformer`, of the steps before it too, as
        many as a segment has. hidden: widths of the hidden layers; the transformer embeds a step by them, and its block
        is as wide as the last. members: size of the ensemble. steps: at most so many updates.
    normalise: every member to mean 0 and standard deviation 1 over all steps before averaging (DTR), so that none
        outweighs another and the scale is known; or plain averages, on the scale of log-odds.
    zero: which reward is 0. `lowest`: that of the worst step, so that to go on is never worse than to end; right where
        ending is failing. `mean`: the mean over all steps (as DTR), where all episodes are of one length or ending
        early is neither good nor bad. For tasks to be done with fast, add the transform `affine` with a shift.
    """

    kind: Literal["preference"] = "preference"
    preferences: AnyPreferences = Annotator()
    model: Literal["mlp", "transformer"] = "mlp"
    hidden: tuple[int, ...] = (64, 64)
    members: int = Field(default=3, ge=1)
    steps: int = Field(default=300, ge=1)
    normalise: bool = True
    zero: Literal["lowest", "mean"] = "lowest"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.model == "transformer" and (not self.hidden or self.hidden[-1] % HEADS):
            raise ValueError(
                f"the last of `hidden` is divided among {HEADS} heads of a transformer; found {self.hidden}"
            )
        return self

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedPreference:
        """Held out are a tenth of the pairs, the same two segments always on the same side.

        trajectories: the whole dataset that the preferences speak of.
        Raises ConfigurationError if there are fewer than two different pairs.
        """
        preferences = evidence.preferences
        assert preferences is not None
        _warn_of(preferences)
        test = self._held_out(preferences)
        seen, place = np.unique(preferences.steps, return_inverse=True)
        inputs = step_inputs(trajectories, seen, False)
        moments = moments_of(inputs[np.isin(seen, preferences.steps[~test])])
        standard = torch.from_numpy(standard_inputs(inputs, moments)).to(device)
        pairs = _Pairs(
            standard,
            torch.from_numpy(place.reshape(preferences.steps.shape)).to(device),
            torch.from_numpy(preferences.first_better).to(device),
        )
        model, best_step = self._train(pairs, test, preferences.length, progress)

        fitted = FittedPreference(self, model, moments, np.zeros(self.members), np.ones(self.members), 0.0, {})
        found = fitted.judge(pairs, np.flatnonzero(test))
        fitted.report.update(
            pairs=len(test),
            ties=int((preferences.first_better == 0.5).sum()),
            best_step=best_step,
            held_out=found.model_dump(),
            findings=[finding.model_dump(mode="json") for finding in preferences.findings],
        )
        if found.loss + 2 * found.loss_error >= found.loss_of_even:
            warnings.warn(
                f"preference: the loss on {found.n} held-out pairs is {found.loss:.4g} (standard error "
                f"{found.loss_error:.2g}), that of always saying 'even' {found.loss_of_even:.4g}: as far as one can "
                "tell, nothing was learned. State more preferences.",
                stacklevel=2,
            )
        fitted.measure(trajectories)
        return fitted

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedPreference:
        mean, std, minimum, maximum = state["inputs"].cpu().numpy()
        count, zero = state["numbers"].tolist()
        centre, scale = state["members"].cpu().numpy()
        kind = AttentionModel if self.model == "transformer" else StepModel
        model: SegmentModel = kind.of(
            {n.removeprefix("model."): t.to(device) for n, t in state.items() if n.startswith("model.")}
        )
        name, sizes = ("rewards", (*self.hidden, 1)) if self.model == "mlp" else ("embedding", self.hidden)
        first = model.parts[name]
        if first.n_networks != self.members or first.sizes != (len(mean), *sizes):
            raise ValueError(f"{first.n_networks} networks of {first.sizes}")
        moments = Moments(int(count), mean, std, minimum, maximum, state["constant"].cpu().numpy())
        return FittedPreference(self, model, moments, centre, scale, zero, report)

    def _held_out(self, preferences: Preferences) -> np.ndarray:
        """[Q] bool, the pairs that are not trained on."""
        _, pair = np.unique(np.sort(preferences.starts, axis=1), axis=0, return_inverse=True)
        n = int(pair.max()) + 1
        if n < 2:
            raise ConfigurationError(
                "preference: all preferences are between the same two segments. Some pairs are held out to know when "
                "to stop, so there must be at least two different ones: state more preferences."
            )
        drawn = np.random.default_rng([self.seed, 1]).permutation(n)[: max(1, round(HELD_OUT * n))]
        held_out: np.ndarray = np.isin(pair.reshape(-1), drawn)
        return held_out

    def _train(
        self, pairs: _Pairs, test: np.ndarray, length: int, progress: Progress
    ) -> tuple[SegmentModel, list[JsonValue]]:
        """The members, each with the weights of its smallest held-out loss, and the steps at which they had them.

        test: [Q] bool. Every member has its own initialisation and batches, of the same pairs.
        """
        device = pairs.inputs.device
        starts = [generator(self.seed, f"initialisation of member {m}") for m in range(self.members)]
        draws = [generator(self.seed, f"batches of member {m}") for m in range(self.members)]
        n_inputs = pairs.inputs.shape[1]
        model: SegmentModel
        if self.model == "mlp":
            model = StepModel.fresh(n_inputs, self.hidden, starts, device)
        else:
            model = AttentionModel.fresh(n_inputs, self.hidden, length, starts, device)
        optimiser = Adam(model.parameters(), LEARNING_RATE, decay_steps=self.steps)
        train = torch.from_numpy(np.flatnonzero(~test))
        held_out = torch.from_numpy(np.flatnonzero(test)).expand(self.members, -1)
        best = Best(model, self.members, PATIENCE * CHECK_EVERY, device)
        for step in range(1, self.steps + 1):
            batch = torch.stack([train[torch.randint(len(train), (BATCH,), generator=draw)] for draw in draws])
            loss = pairs.loss(model, batch).mean(1).sum()
            optimiser.step(torch.autograd.grad(loss, model.parameters()))
            if step % CHECK_EVERY == 0 or step == self.steps:
                with torch.no_grad():
                    error = torch.cat([pairs.loss(model, part) for part in held_out.split(BATCH, 1)], 1).mean(1)
                progress(1)
                if best.look(step, model, error):
                    break
        return best.networks, best.steps.tolist()


@dataclass(eq=False)
class _Pairs:
    """Pairs of segments as a network sees them.

    inputs: [U, D] standardised, of every step in any segment. steps: [Q, 2, L] rows of `inputs`. first_better: [Q].
    """

    inputs: Tensor
    steps: Tensor
    first_better: Tensor

    def scores(self, model: SegmentModel, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """What the first and second segments of `pairs` [P, B] are worth, [P, B] each."""
        segments = self.inputs[self.steps[pairs.to(self.inputs.device)]]
        first, second = model.scores(segments.flatten(1, 2)).unflatten(1, (-1, 2)).unbind(-1)
        return first, second

    def loss(self, model: SegmentModel, pairs: Tensor) -> Tensor:
        """[P, B], each pair's."""
        return bradley_terry_loss(*self.scores(model, pairs), self.first_better[pairs.to(self.inputs.device)])


@dataclass(eq=False)
class FittedPreference:
    """An ensemble, and what puts its members on one scale.

    input_moments: of the steps trained on. centre, scale: [P] float64, taken off and divided by before averaging.
    zero: taken off the average. report: counts and `HeldOut`.
    """

    configuration: Preference
    model: SegmentModel
    input_moments: Moments
    centre: np.ndarray
    scale: np.ndarray
    zero: float
    report: dict[str, JsonValue]

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        """The mean of the members, and how far they are apart (`ensemble_std`, mean over each episode)."""
        rewards = np.empty(trajectories.n_steps, np.float32)
        std = np.empty(trajectories.n_steps)
        finished = 0
        for steps, said in self._said(trajectories):
            members = self._on_one_scale(said)
            rewards[steps] = members.mean(0) - self.zero
            std[steps] = members.std(0)
            reached = int(trajectories.episode_index[steps.stop - 1])
            progress(reached - finished)
            finished = reached
        progress(trajectories.n_episodes - finished)
        total = np.add.reduceat(std, trajectories.offsets[:-1])
        return Labels(rewards, pl.DataFrame({"ensemble_std": total / trajectories.lengths}))

    def measure(self, trajectories: Trajectories) -> None:
        """Set centre, scale and zero from all steps. Members that always say the same are warned of, and count as 0."""
        said = np.concatenate([members for _, members in self._said(trajectories)], axis=1)
        found = moments_of(said.T)
        self.centre = found.mean
        if self.configuration.normalise:
            self.scale = found.scale
        if found.constant.any():
            warnings.warn(
                f"preference: {int(found.constant.sum())} of {self.configuration.members} members say the same of "
                "every step and count as 0.",
                stacklevel=3,
            )
        if self.configuration.zero == "lowest":
            pieces = (said[:, start : start + BLOCK] for start in range(0, said.shape[1], BLOCK))
            self.zero = min(float(self._on_one_scale(piece).mean(0).min()) for piece in pieces)

    def _on_one_scale(self, said: np.ndarray) -> np.ndarray:
        """[P, n] float64, what members said [P, n], made comparable."""
        members: np.ndarray = (said - self.centre[:, None]) / self.scale[:, None]
        return members

    @torch.no_grad()
    def _said(self, trajectories: Trajectories) -> Iterator[tuple[slice, np.ndarray]]:
        """Outputs of the members [P, n] float32 for one slice of steps after the other."""
        context = self.model.context
        size = max(1, BLOCK // context)
        device = self.model.parameters()[0].device
        for start in range(0, trajectories.n_steps, size):
            asked = np.minimum(np.arange(start, start + size), trajectories.n_steps - 1)
            first = np.maximum(trajectories.offsets[trajectories.episode_index[asked]], asked - context + 1)
            steps = np.arange(first[0], asked[-1] + 1)
            inputs = standard_inputs(step_inputs(trajectories, steps, False), self.input_moments)
            windows = np.minimum(first[:, None] + np.arange(context), asked[-1]) - first[0]
            said = self.model.rewards(
                torch.from_numpy(inputs[windows]).to(device), torch.from_numpy(asked - first).to(device)
            )
            stop = min(start + size, trajectories.n_steps)
            yield slice(start, stop), said[:, : stop - start].cpu().numpy()

    @torch.no_grad()
    def judge(self, pairs: _Pairs, which: np.ndarray) -> HeldOut:
        """How good the ensemble is on the given pairs, by the mean over its members of P(first better)."""
        probability = np.empty(len(which))
        for start in range(0, len(which), BATCH):
            batch = torch.from_numpy(which[start : start + BATCH]).expand(self.configuration.members, -1)
            first, second = pairs.scores(self.model, batch)
            probability[start : start + BATCH] = (first - second).double().sigmoid().mean(0).cpu().numpy()
        return held_out(probability, pairs.first_better.cpu().numpy()[which].astype(np.float64))

    def state(self) -> dict[str, Tensor]:
        moments = self.input_moments
        inputs = np.stack([moments.mean, moments.std, moments.minimum, moments.maximum])
        return {
            "inputs": torch.from_numpy(inputs),
            "constant": torch.from_numpy(moments.constant),
            "members": torch.from_numpy(np.stack([self.centre, self.scale])),
            "numbers": torch.tensor([moments.count, self.zero], dtype=torch.float64),
            **{f"model.{name}": tensor for name, tensor in self.model.state().items()},
        }


class HeldOut(Config):
    """How good predictions are, and how honest their confidence, on pairs that were not trained on.

    n: how many; n_ties of them are ties. loss, loss_error, loss_of_even: mean cross-entropy, its standard error (0 for
        one pair), and that of always saying one half.
    accuracy: share of untied pairs whose stated winner is the predicted one. confidence: mean probability of the
        predicted winner, there; more than the accuracy is too sure. calibration_error: mean distance between the two in
        bins of equal width in probability, weighted by pairs (Naeini et al. 2015). All None without untied pairs.
    The same pairs decide when training stops, so the numbers are a little flattering.
    """

    n: int
    n_ties: int
    loss: float
    loss_error: float
    loss_of_even: float
    accuracy: float | None
    confidence: float | None
    calibration_error: float | None


def held_out(probability: np.ndarray, first_better: np.ndarray) -> HeldOut:
    """probability, first_better: [n] float64 in [0, 1], predicted and stated, that the first is better."""
    untied = first_better != 0.5
    # float32 members can be so sure that log(1 - p) is infinite: what they were trained on is capped likewise.
    p = np.clip(probability, 1e-7, 1 - 1e-7)
    right = ((p > 0.5) == (first_better > 0.5))[untied]
    sure = np.maximum(p, 1 - p)[untied]
    place = np.minimum(((sure - 0.5) * 2 * BINS).astype(int), BINS - 1)
    apart = np.bincount(place, right - sure, BINS)
    loss = -(first_better * np.log(p) + (1 - first_better) * np.log(1 - p))
    some = bool(untied.any())
    return HeldOut(
        n=len(p),
        n_ties=int((~untied).sum()),
        loss=float(loss.mean()),
        loss_error=float(loss.std() / np.sqrt(max(1, len(p) - 1))),
        loss_of_even=float(np.log(2)),
        accuracy=float(right.mean()) if some else None,
        confidence=float(sure.mean()) if some else None,
        calibration_error=float(np.abs(apart).sum() / len(sure)) if some else None,
    )


def _warn_of(preferences: Preferences) -> None:
    """One warning for each kind of thing that is odd; the report has them all."""
    found = [finding for finding in preferences.findings if finding.severity != Severity.NOTE]
    for code in dict.fromkeys(finding.code for finding in found):
        said = [finding.message for finding in found if finding.code == code]
        more = f" And {len(said) - SHOWN:,} more." if len(said) > SHOWN else ""
        warnings.warn(f"preference: {' '.join(said[:SHOWN])}{more}", stacklevel=3)
