"""Evidence: what a labeler may look at besides the trajectories, named in its configuration and in no other way."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from pydantic import Field, JsonValue, model_validator

from data.config import Config
from data.digests import ColumnHasher, digest_of, digest_of_file
from data.errors import ConfigurationError
from data.findings import Finding
from data.labels import episode_returns
from data.readers.files import check_readable
from data.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class Preferences:
    """Which of two segments of one dataset is better, for Q pairs.

    starts: [Q, 2] int64, the first step of either segment, counted over the whole dataset. length: steps of every
    segment, all of one episode. first_better: [Q] float32 in [0, 1], the probability that the first segment is better;
    0.5 is a tie. findings: what was left out or seems odd.
    """

    starts: np.ndarray
    length: int
    first_better: np.ndarray
    findings: tuple[Finding, ...] = ()

    @property
    def steps(self) -> np.ndarray:
        """[Q, 2, length] int64, every step of every segment."""
        steps: np.ndarray = self.starts[:, :, None] + np.arange(self.length)
        return steps


@dataclass(frozen=True, eq=False)
class Evidence:
    """What an evidence specification came to. `digest` identifies it by content and enters the label id.

    demonstrations: whole episodes to imitate.
    rewards: [N] float32, known rewards of the dataset being labelled, NaN on the steps where they are not known.
    returns: [E] float64, known returns of the dataset being labelled, NaN for the episodes where they are not known.
    preferences: between segments of the dataset being labelled.
    actions: [N, ...] like the actions of the dataset being labelled, where they are known; elsewhere NaN, or -1 where
        actions are discrete.
    """

    digest: str
    demonstrations: Trajectories | None = None
    rewards: np.ndarray | None = None
    returns: np.ndarray | None = None
    preferences: Preferences | None = None
    actions: np.ndarray | None = None

    @property
    def known(self) -> np.ndarray | None:
        """What it says of single steps: rewards or actions."""
        return self.rewards if self.actions is None else self.actions


NOTHING = Evidence(digest="none")


class EvidenceSource(Protocol):
    """Where evidence is looked up: the datasets and label sets of a study, or anything else with names."""

    def trajectories(self, name: str) -> Trajectories:
        """A dataset by its name. `self` is the one being labelled. Raises ConfigurationError if unknown."""

    def rewards(self, name: str, labels: str) -> np.ndarray:
        """[N] float32, label set `labels` of dataset `name`. Raises ConfigurationError if there is none."""

    def demonstrations_of_dataset(self) -> str | None:
        """Name of the demonstrations that the dataset being labelled brings along, if it does."""


@dataclass(frozen=True)
class Reference:
    """A name in a specification, so that it can be checked before any work.

    dataset: `self` for the dataset being labelled, None for the demonstrations it brings along. labels: a label set of
    that dataset, or None. place: the keys that lead to the name inside the labeler's configuration.
    """

    dataset: str | None
    labels: str | None
    place: tuple[str, ...]


class EvidenceSpec(Config):
    """Base of the ways to name evidence."""

    @abstractmethod
    def references(self, field: str) -> list[Reference]:
        """Everything that `resolve` will look up. field: name of the configuration's field that holds this."""

    @abstractmethod
    def resolve(self, source: EvidenceSource) -> Evidence:
        """Look up what is named. Raises ConfigurationError naming what is missing."""

    def identity(self) -> dict[str, JsonValue]:
        """What this says, with files known by their content and not by their path."""
        return self.model_dump(mode="json")

    def beside(self, folder: Path) -> Self:
        """The same, with relative paths taken from `folder`."""
        return self


class EvidenceFile(EvidenceSpec):
    """Base of evidence that lies in a file of its own, known by its content.

    path: relative to the study file.
    """

    path: Path

    def references(self, field: str) -> list[Reference]:
        return []

    def identity(self) -> dict[str, JsonValue]:
        check_readable(self.path)
        return {**self.model_dump(mode="json", exclude={"path"}), "content": digest_of_file(self.path)}

    def beside(self, folder: Path) -> Self:
        return self.model_copy(update={"path": folder / self.path.expanduser()})


class Demonstrations(EvidenceSpec):
    """Whole episodes to imitate: chosen by index, or the best by a named label set.

    dataset: the dataset they come from; `self` for the one being labelled; None for the demonstrations that the
        study names beside the dataset.
    episodes: their indices. top: instead, the K episodes of highest return by label set `by` (ties: lower index first).
    """

    dataset: str | None = None
    episodes: tuple[int, ...] | None = None
    top: int | None = None
    by: str | None = None

    def references(self, field: str) -> list[Reference]:
        named = [Reference(self.dataset, None, (field, "dataset"))]
        return named if self.by is None else [*named, Reference(self.dataset, self.by, (field, "by"))]

    @model_validator(mode="after")
    def _named_one_way(self) -> Demonstrations:
        if (self.episodes is None) == (self.top is None) or (self.top is None) != (self.by is None):
            raise ValueError("name them either by `episodes: [0, 3]`, or by `top: 5` with `by: <label set>`")
        return self

    def resolve(self, source: EvidenceSource) -> Evidence:
        name = self.dataset or source.demonstrations_of_dataset()
        if name is None:
            raise ConfigurationError(
                "no demonstrations are named: give the dataset `demonstrations: <dataset>`, "
                "or the labeler `demonstrations: {dataset: <dataset>, ...}`."
            )
        trajectories = source.trajectories(name)
        episodes = self._best(source, name, trajectories) if self.episodes is None else np.asarray(self.episodes)
        chosen = trajectories.select(episodes)
        return Evidence(digest=digest_of({"demonstrations": chosen.digest()}), demonstrations=chosen)

    def _best(self, source: EvidenceSource, name: str, trajectories: Trajectories) -> np.ndarray:
        assert self.top is not None and self.by is not None
        if not 1 <= self.top <= trajectories.n_episodes:
            raise ConfigurationError(f"top: {self.top} of the {trajectories.n_episodes} episodes of '{name}'.")
        returns = episode_returns(source.rewards(name, self.by), trajectories.offsets)
        return np.argsort(-returns, kind="stable")[: self.top]


class KnownRewards(EvidenceSpec):
    """Rewards of the dataset itself, all steps, by a named label set."""

    labels: str = "source"

    def references(self, field: str) -> list[Reference]:
        return [Reference("self", self.labels, (field, "labels"))]

    def resolve(self, source: EvidenceSource) -> Evidence:
        return _known(np.asarray(source.rewards("self", self.labels), np.float32))


class LabelledTransitions(EvidenceSpec):
    """Rewards of a part of the dataset itself, by a named label set: some steps anywhere, or some whole episodes.

    fraction: in (0, 1], of the steps or of the episodes; floor(fraction * n + 1/2) of them, never more or fewer.
    per: what is drawn, uniformly and without replacement. The draw depends on `seed`, on their number and on their
        order in the dataset alone; with one seed, a larger fraction contains every smaller one.
    """

    labels: str = "source"
    fraction: float = Field(default=0.01, gt=0, le=1)
    per: Literal["step", "episode"] = "step"
    seed: int = Field(default=0, ge=0)

    def references(self, field: str) -> list[Reference]:
        return [Reference("self", self.labels, (field, "labels"))]

    def resolve(self, source: EvidenceSource) -> Evidence:
        rewards = np.asarray(source.rewards("self", self.labels), np.float32)
        trajectories = source.trajectories("self")
        n = trajectories.n_steps if self.per == "step" else trajectories.n_episodes
        chosen = _drawn(n, self.fraction, self.seed, self.per)
        labelled = chosen if self.per == "step" else np.repeat(chosen, trajectories.lengths)
        return _known(np.where(labelled, rewards, np.float32(np.nan)))


class TrajectoryReturns(EvidenceSpec):
    """Returns (sums of rewards, undiscounted) of some whole episodes of the dataset itself, by a named label set.

    Which step earned what is not among the evidence.

    fraction: in (0, 1], of the episodes, drawn as those of `LabelledTransitions` are with `per: episode`.
    """

    labels: str = "source"
    fraction: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)

    def references(self, field: str) -> list[Reference]:
        return [Reference("self", self.labels, (field, "labels"))]

    def resolve(self, source: EvidenceSource) -> Evidence:
        trajectories = source.trajectories("self")
        returns = episode_returns(np.asarray(source.rewards("self", self.labels)), trajectories.offsets)
        returns[~_drawn(trajectories.n_episodes, self.fraction, self.seed, "episode")] = np.nan
        hasher = ColumnHasher()
        hasher.update(returns)
        return Evidence(digest=digest_of({"returns": hasher.digest()}), returns=returns)


class LabelledActions(EvidenceSpec):
    """Actions of some whole episodes of the dataset itself; those of the others are taken as not known.

    fraction: in (0, 1], of the episodes, drawn as those of `LabelledTransitions` are with `per: episode`.
    """

    fraction: float = Field(default=0.1, gt=0, le=1)
    seed: int = Field(default=0, ge=0)

    def references(self, field: str) -> list[Reference]:
        return []

    def resolve(self, source: EvidenceSource) -> Evidence:
        trajectories = source.trajectories("self")
        chosen = np.repeat(_drawn(trajectories.n_episodes, self.fraction, self.seed, "episode"), trajectories.lengths)
        actions = np.array(trajectories.actions)
        actions[~chosen] = np.nan if trajectories.n_actions is None else -1
        hasher = ColumnHasher()
        hasher.update(actions)
        return Evidence(digest=digest_of({"actions": hasher.digest()}), actions=actions)


def _drawn(n: int, fraction: float, seed: int, unit: str) -> np.ndarray:
    """[n] bool, which of n are drawn. Raises ConfigurationError, naming the `unit`s, if none would be."""
    count = math.floor(fraction * n + 0.5)
    if count == 0:
        raise ConfigurationError(f"fraction: {fraction} of {n:,} {unit}s is none: {1 / n:.2g} would be one of them.")
    chosen = np.zeros(n, bool)
    chosen[np.random.default_rng(seed).permutation(n)[:count]] = True
    return chosen


def _known(rewards: np.ndarray) -> Evidence:
    hasher = ColumnHasher()
    hasher.update(rewards)
    return Evidence(digest=digest_of({"rewards": hasher.digest()}), rewards=rewards)
