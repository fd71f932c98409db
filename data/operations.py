"""Datasets made from stored ones: merged, split by episode, filtered.

A result is stored like any other dataset. Its manifest's provenance says the operation, its settings, and of each
parent name, digest and episodes taken. The parents' rewards go along as its own label set `source`; other label sets
do not, since what a labeler gives depends on the whole dataset it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from pydantic import Field, JsonValue

from data.config import Config
from data.errors import ConfigurationError, DatasetError
from data.findings import Finding, Severity
from data.progress import Progress, silent
from data.readers.reader import Block
from data.rewards_aside import RewardsAside
from data.store import Store, StoredDataset, StoredLabels

ROUNDING = 1e-6
"""Fractions that sum to 1 but for so much do."""


class Derived(Config):
    """What an operation gave. source_labels: id of the label set `source`, None if not all parents have rewards."""

    name: str
    dataset: str
    source_labels: str | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, eq=False)
class Parent:
    """A dataset that another is made from. rewards: its label set that goes along, None for none."""

    dataset: StoredDataset
    rewards: StoredLabels | None


class Criteria(Config):
    """Which episodes to keep: those whose steps and return are within all ends that are set, and of them the best.

    shortest, longest: number of steps. lowest, highest: return. Episodes at an end are kept. top: so many with the
    highest return; the earlier one of equals.
    """

    shortest: int | None = None
    longest: int | None = None
    lowest: float | None = None
    highest: float | None = None
    top: int | None = Field(default=None, ge=1)

    @property
    def need_returns(self) -> bool:
        """Whether a condition is on returns."""
        return any(condition is not None for condition in (self.lowest, self.highest, self.top))

    def chosen(self, lengths: np.ndarray, returns: np.ndarray | None) -> np.ndarray:
        """Rising indices of the episodes to keep. lengths: [E] steps. returns: [E], None if not needed.

        Raises ConfigurationError where no condition is set, DatasetError where fewer than `top` are left, or none.
        """
        if self == Criteria():
            raise ConfigurationError("no condition is set: say shortest, longest, lowest, highest or top.")
        kept = _within(lengths, self.shortest, self.longest)
        if returns is not None:
            kept &= _within(returns, self.lowest, self.highest)
        episodes = np.flatnonzero(kept)
        if len(episodes) < (self.top or 1):
            raise DatasetError(
                f"{len(episodes):,} of {len(lengths):,} episodes are within the ends: {self.top or 1:,} are needed. "
                f"Asked for: {', '.join(f'{key} {end:g}' for key, end in self.model_dump(exclude_none=True).items())}."
            )
        if self.top is None or returns is None:
            return episodes
        return np.sort(episodes[np.argsort(-returns[episodes], kind="stable")[: self.top]])


def _within(values: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    within: np.ndarray = (values >= (-np.inf if low is None else low)) & (values <= (np.inf if high is None else high))
    return within


def merge(store: Store, name: str, parents: Sequence[Parent], progress: Progress = silent) -> Derived:
    """All episodes of all parents, in their order, as dataset `name`.

    Rewards go along if every parent has some. Raises DatasetError where parents differ in shapes, dtypes or what
    actions mean, ConfigurationError for fewer than two.
    """
    if len(parents) < 2:
        raise ConfigurationError("merging needs two datasets or more.")
    _refuse_unlike([parent.dataset for parent in parents])
    everything = [_Taken(parent, np.arange(parent.dataset.manifest.n_episodes)) for parent in parents]
    return _derive(store, name, "merge", {}, everything, progress)


def split(
    store: Store, parts: Mapping[str, float], parent: Parent, seed: int, progress: Progress = silent
) -> list[Derived]:
    """The episodes of one dataset dealt out at random to datasets named by `parts`, each in the parent's order.

    parts: fraction of the episodes by name; they sum to 1. Each part gets that many to the nearest whole number.
    seed: the same gives the same parts. Raises ConfigurationError where fractions do not sum to 1 or a part would be
    empty: one episode cannot be split.
    """
    n = parent.dataset.manifest.n_episodes
    total = sum(parts.values())
    if len(parts) < 2 or min(parts.values()) <= 0 or abs(total - 1) > ROUNDING:
        raise ConfigurationError(f"a split needs two fractions or more, above 0, that sum to 1; they sum to {total:g}.")
    ends = np.rint(np.cumsum([0.0, *parts.values()]) * n).astype(np.int64)
    for part, count in zip(parts, np.diff(ends), strict=True):
        if not count:
            raise ConfigurationError(
                f"'{part}' would have no episodes: {parts[part]:g} of the {n:,} of '{parent.dataset.name}'."
            )
    order = np.random.default_rng(seed).permutation(n)
    settings: dict[str, JsonValue] = {"parts": dict(parts), "seed": seed}
    return [
        _derive(store, part, "split", settings, [_Taken(parent, np.sort(order[start:stop]))], progress)
        for part, (start, stop) in zip(parts, pairwise(ends.tolist()), strict=True)
    ]


def filter_episodes(
    store: Store,
    name: str,
    parent: Parent,
    criteria: Criteria,
    by: StoredLabels | None = None,
    progress: Progress = silent,
) -> Derived:
    """The episodes that pass `criteria`, in their order, as dataset `name`.

    by: the label set whose returns are meant. Raises ConfigurationError if it is needed and not given, and what
    `Criteria.chosen` raises.
    """
    settings: dict[str, JsonValue] = criteria.model_dump(mode="json", exclude_none=True)
    returns = None
    if criteria.need_returns:
        if by is None:
            raise ConfigurationError(f"'{parent.dataset.name}': a condition on returns needs a label set to sum.")
        settings |= {"by": by.id, "labeler": by.labeler}
        returns = parent.dataset.returns(by)
    taken = _Taken(parent, criteria.chosen(parent.dataset.trajectories().lengths, returns))
    return _derive(store, name, "filter", settings, [taken], progress)


# ---------------------------------------------------------------- what they share


@dataclass(frozen=True, eq=False)
class _Taken:
    """Some episodes of a parent. episodes: rising indices."""

    parent: Parent
    episodes: np.ndarray = field(repr=False)

    def blocks(self, with_rewards: bool) -> Iterator[Block]:
        first = 0
        for block in self.parent.dataset.blocks(self.parent.rewards if with_rewards else None):
            trajectories = block.trajectories
            low, high = np.searchsorted(self.episodes, [first, first + trajectories.n_episodes])
            own = self.episodes[low:high] - first
            first += trajectories.n_episodes
            if len(own):
                steps = np.isin(trajectories.episode_index, own)
                yield Block(trajectories.select(own), None if block.rewards is None else block.rewards[steps])

    def origin(self) -> dict[str, JsonValue]:
        dataset = self.parent.dataset
        rewards = None if self.parent.rewards is None else self.parent.rewards.id
        return {
            "name": dataset.name,
            "digest": dataset.digest,
            "rewards": rewards,
            "episodes": "all" if len(self.episodes) == dataset.manifest.n_episodes else self.episodes.tolist(),
        }


def _derive(
    store: Store,
    name: str,
    operation: str,
    settings: Mapping[str, JsonValue],
    taken: Sequence[_Taken],
    progress: Progress,
) -> Derived:
    """Store the episodes taken as dataset `name`, and their rewards, if all are known, as its label set `source`."""
    without = [one.parent.dataset.name for one in taken if one.parent.rewards is None]
    findings = []
    if without and len(without) < len(taken):
        message = f"the rewards do not go along: {', '.join(without)} has none, and a label set covers every step."
        findings.append(Finding(code="source-not-carried", severity=Severity.WARNING, message=message))
    lineage: dict[str, JsonValue] = {
        "operation": operation,
        "settings": dict(settings),
        "parents": [one.origin() for one in taken],
    }
    with store.scratch("rewards") as scratch:
        rewards = RewardsAside(scratch / "rewards.raw")
        blocks = (block for one in taken for block in one.blocks(with_rewards=not without))
        dataset = store.write_dataset(name, rewards.without(blocks, progress), lineage, findings)
        labels = rewards.store_labels(store, dataset, lineage)
    return Derived(name=name, dataset=dataset.digest, source_labels=labels, findings=tuple(findings))


def _refuse_unlike(datasets: Sequence[StoredDataset]) -> None:
    first = datasets[0].manifest
    for other in (dataset.manifest for dataset in datasets[1:]):
        for what in ("observation", "action", "n_actions", "action_bounds"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise DatasetError(f"'{first.name}' and '{other.name}' differ in {what}: {ours} and {theirs}.")
