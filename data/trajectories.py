"""Trajectories without rewards, in memory or mapped from disk.

Layout, for N steps in E episodes: `observations` holds every time point, N + E rows, so that the observation after
each episode's last step is kept. Step i of episode e has observation row i + e and next observation row i + e + 1:
nothing is stored twice and no next observation can cross an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from data.digests import ColumnHasher, digest_of
from data.errors import DatasetError


class Sharded:
    """One array whose rows lie in several others (usually mapped from disk); indexed like a numpy array by rows.

    Slices and index arrays return a fresh numpy array with only the rows asked for in memory.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        """parts: at least one array; all have the same dtype and row shape."""
        assert parts and all(p.dtype == parts[0].dtype and p.shape[1:] == parts[0].shape[1:] for p in parts)
        self._parts = list(parts)
        self._starts = np.concatenate([[0], np.cumsum([len(p) for p in parts])])

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of every row."""
        return self._parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows in all parts, then the shape of one row."""
        return (int(self._starts[-1]), *self._parts[0].shape[1:])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            start, stop, stride = rows.indices(len(self))
            if stride != 1:
                return self[np.arange(start, stop, stride)]
            if stop <= start:
                return np.empty((0, *self.shape[1:]), self.dtype)
            first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
            if first == last:
                offset = self._starts[first]
                piece: np.ndarray = self._parts[first][start - offset : stop - offset]
                return piece
            pieces = [
                self._parts[p][max(start - self._starts[p], 0) : stop - self._starts[p]] for p in range(first, last + 1)
            ]
            return np.concatenate(pieces)
        rows = np.asarray(rows)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if rows.size and (rows.min() < -len(self) or rows.max() >= len(self)):
            raise IndexError(f"row out of range for {len(self)} rows")
        rows = np.where(rows < 0, rows + len(self), rows)
        out = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        part = np.searchsorted(self._starts, rows, side="right") - 1
        for p in np.unique(part):
            here = part == p
            out[here] = self._parts[p][rows[here] - self._starts[p]]
        return out

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        return whole if dtype is None else whole.astype(dtype, copy=False)


Column: TypeAlias = np.ndarray | Sharded


@dataclass(frozen=True, eq=False)
class Trajectories:
    """E episodes with N steps in all, without rewards.

    observations: [N + E, ...], any numeric dtype; row `offsets[e + 1] + e` is the one after episode e's last step.
    actions: [N, ...]; float for continuous, integer for discrete actions.
    offsets: [E + 1] int64, rising from 0 to N; episode e owns steps offsets[e] .. offsets[e + 1], at least one.
    terminated: [E] bool, the task ended: the value after the last step is 0.
    truncated: [E] bool, the recording stopped: the value after the last step is that of the last observation.
        An episode is one of the two, or both; then terminated counts for bootstrapping.
    final_observed: [E] bool, whether the observation after the last step is known. Where it is not, its row repeats
        the one before and is never used: see `transition_index`.
    n_actions: for discrete actions the number of choices, one entry for a scalar action ([N] actions), one per
        dimension for multi-discrete ([N, d] actions). None for continuous actions. By declaration, never from values.
    action_bounds: lowest and highest value of every continuous action dimension, where the source declares them.

    Raises DatasetError if these shapes do not fit together.
    """

    observations: Column
    actions: Column
    offsets: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_observed: np.ndarray
    n_actions: tuple[int, ...] | None = None
    action_bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        n_episodes = len(self.offsets) - 1
        if n_episodes < 0 or self.offsets[0] != 0 or np.any(np.diff(self.offsets) < 1):
            raise DatasetError(
                "episode offsets must start at 0 and rise by at least one step an episode; "
                f"found {np.array2string(self.offsets, threshold=8)}."
            )
        n_steps = int(self.offsets[-1])
        if len(self.actions) != n_steps:
            raise DatasetError(f"{len(self.actions):,} actions for {n_steps:,} steps: each step needs one action.")
        if len(self.observations) != n_steps + n_episodes:
            raise DatasetError(
                f"{len(self.observations):,} observations for {n_steps:,} steps in {n_episodes:,} episodes: "
                f"expected {n_steps + n_episodes:,}, one more than steps in each episode."
            )
        for name in ("terminated", "truncated", "final_observed"):
            flags = getattr(self, name)
            if flags.shape != (n_episodes,) or flags.dtype != bool:
                raise DatasetError(
                    f"'{name}' is {flags.dtype} {flags.shape}; expected one bool for each of {n_episodes:,} episodes."
                )
        if not np.all(self.terminated | self.truncated):
            episode = int(np.flatnonzero(~(self.terminated | self.truncated))[0])
            raise DatasetError(f"episode {episode} is neither terminated nor truncated: it must be one or both.")
        if self.n_actions is not None:
            expected = self.actions.shape[1:] or (1,)
            if self.actions.dtype.kind not in "iu" or (len(self.n_actions),) != expected:
                raise DatasetError(
                    f"n_actions = {self.n_actions} for actions of {self.actions.dtype} {self.actions.shape[1:]}: "
                    "discrete actions are integers, with one count for each action dimension."
                )

    @property
    def n_steps(self) -> int:
        """N, the number of steps."""
        return int(self.offsets[-1])

    @property
    def n_episodes(self) -> int:
        """E, the number of episodes."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[E] int64, steps in each episode."""
        return np.diff(self.offsets)

    @property
    def discrete(self) -> bool:
        """Whether actions are choices among a fixed number."""
        return self.n_actions is not None

    @cached_property
    def episode_index(self) -> np.ndarray:
        """[N] int64, the episode of each step."""
        return np.repeat(np.arange(self.n_episodes), self.lengths)

    def observation_rows(self, step_index: np.ndarray) -> np.ndarray:
        """Rows of `observations` seen at the given steps; the next observations are one row further."""
        # Not by `episode_index`, which is as long as the dataset: a batch of a large one is wanted at once.
        episodes = np.searchsorted(self.offsets, step_index, side="right") - 1
        rows: np.ndarray = step_index + episodes
        return rows

    @property
    def step_observations(self) -> np.ndarray:
        """[N, ...] the observation at each step, final observations left out. Loads them all."""
        return self.observations[np.arange(self.n_steps) + self.episode_index]

    @property
    def without_next(self) -> np.ndarray:
        """Rising int64, steps that are no transitions: see `transition_index`, which is as long as the dataset."""
        steps: np.ndarray = self.offsets[1:][~self.final_observed & ~self.terminated] - 1
        return steps

    @cached_property
    def transition_index(self) -> np.ndarray:
        """[M] int64, steps usable as transitions: their next observation is known, or their episode terminated there.

        Left out are only the last steps of truncated episodes whose final observation was not recorded.
        """
        usable = np.ones(self.n_steps, bool)
        usable[self.without_next] = False
        return np.flatnonzero(usable)

    @cached_property
    def continues(self) -> np.ndarray:
        """[N] bool, False on the last step of a terminated episode: where it is False the value after the step is 0."""
        continues = np.ones(self.n_steps, bool)
        continues[self.offsets[1:][self.terminated] - 1] = False
        return continues

    def part(self, start: int, stop: int) -> Trajectories:
        """Episodes start .. stop, as views of columns that are arrays."""
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return replace(
            self,
            observations=self.observations[a + start : b + stop],
            actions=self.actions[a:b],
            offsets=self.offsets[start : stop + 1] - a,
            terminated=self.terminated[start:stop],
            truncated=self.truncated[start:stop],
            final_observed=self.final_observed[start:stop],
        )

    def select(self, episodes: Sequence[int] | np.ndarray) -> Trajectories:
        """The given episodes, in the given order, in memory. Raises DatasetError for an episode that does not exist."""
        chosen = np.asarray(episodes, np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.n_episodes)]
        if len(outside):
            last = self.n_episodes - 1
            raise DatasetError(f"episode {outside[0]} does not exist: the dataset has episodes 0 to {last}.")
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        steps = _ranges(self.offsets[chosen], lengths)
        rows = _ranges(self.offsets[chosen] + chosen, lengths + 1)
        return replace(
            self,
            observations=self.observations[rows],
            actions=self.actions[steps],
            offsets=offsets,
            terminated=self.terminated[chosen],
            truncated=self.truncated[chosen],
            final_observed=self.final_observed[chosen],
        )

    def digest(self) -> str:
        """Identity of the content: columns, dtypes, episode ends and what actions mean; not how it was stored."""
        observations, actions = ColumnHasher(), ColumnHasher()
        for hasher, column in ((observations, self.observations), (actions, self.actions)):
            stride = max(1, (1 << 26) // max(1, column.dtype.itemsize * int(np.prod(column.shape[1:]))))
            for start in range(0, max(len(column), 1), stride):
                hasher.update(column[start : start + stride])
        return digest_of_columns(
            observations,
            actions,
            self.offsets,
            self.terminated,
            self.truncated,
            self.final_observed,
            self.n_actions,
            self.action_bounds,
        )


def digest_of_columns(
    observations: ColumnHasher,
    actions: ColumnHasher,
    offsets: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_observed: np.ndarray,
    n_actions: tuple[int, ...] | None,
    action_bounds: tuple[float, float] | None,
) -> str:
    """Dataset digest from hashers fed with all rows, for writers that never hold the whole."""
    ends = ColumnHasher()
    ends.update(np.stack([offsets[1:], terminated, truncated, final_observed], axis=1).astype(np.int64))
    return digest_of(
        {
            "observations": observations.digest(),
            "actions": actions.digest(),
            "ends": ends.digest(),
            "n_actions": n_actions,
            "action_bounds": action_bounds,
        }
    )


def concatenate(parts: Sequence[Trajectories]) -> Trajectories:
    """All episodes of `parts`, in order, in memory. Raises DatasetError if shapes, dtypes or kinds of action differ."""
    first = parts[0]
    for part in parts:
        for name in ("observations", "actions"):
            ours, theirs = getattr(first, name), getattr(part, name)
            if (ours.dtype, ours.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
                raise DatasetError(
                    f"cannot join '{name}' of {ours.dtype} {ours.shape[1:]} with {theirs.dtype} {theirs.shape[1:]}."
                )
        if (part.n_actions, part.action_bounds) != (first.n_actions, first.action_bounds):
            raise DatasetError(
                f"cannot join datasets whose actions differ in kind: n_actions {first.n_actions} and {part.n_actions}, "
                f"bounds {first.action_bounds} and {part.action_bounds}."
            )
    starts = np.concatenate([[0], np.cumsum([p.n_steps for p in parts])])
    offsets = np.concatenate([[0], *(p.offsets[1:] + s for p, s in zip(parts, starts, strict=False))]).astype(np.int64)
    return replace(
        first,
        observations=np.concatenate([np.asarray(p.observations) for p in parts]),
        actions=np.concatenate([np.asarray(p.actions) for p in parts]),
        offsets=offsets,
        terminated=np.concatenate([p.terminated for p in parts]),
        truncated=np.concatenate([p.truncated for p in parts]),
        final_observed=np.concatenate([p.final_observed for p in parts]),
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers start .. start + length for each pair, one after the other."""
    ends = np.cumsum(lengths)
    integers: np.ndarray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return integers
