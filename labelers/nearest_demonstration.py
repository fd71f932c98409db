"""`nearest_demonstration`: a step is worth its closeness to the nearest step of a demonstration. SEABO.

Lyu, Ma, Wan, Liu, Li and Lu, "SEABO: a simple search-based method for offline imitation learning" (ICLR 2024). Let d be
the Euclidean distance of a transition (s, a, s') to the nearest transition of any demonstration, found by a KD-tree.
Its reward is alpha exp(-beta d / |A|), |A| the number of action dimensions (their eq. 3).

No step waits for another and order plays no part: the cheap rival of `optimal_transport`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import torch
from pydantic import Field
from scipy.spatial import KDTree

from data.errors import DatasetError
from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Demonstrations, Evidence
from labelers.labeler import Labeler
from labelers.reward_model import action_columns

BLOCK = 1 << 14
"""Steps looked up at a time; an answer depends on its own step alone."""


class NearestDemonstration(Labeler):
    """alpha exp(-beta d), with d divided by the number of action dimensions if `per_dimension`.

    The defaults are those of the official code on locomotion. On AntMaze it uses beta 5 and takes 1 off afterwards (the
    transform `affine` with `shift: -1`), on Adroit (s, s') and no division.

    match: what is compared: `sas` (s, a, s') or `ss` (s, s'), flattened and not standardised; discrete actions are
        one-hot, and count as one dimension each in |A|.
    Where the next observation was not recorded, s' is left out of the comparison, on both sides: d is then the least
    that it can have been. The diagnostics name these episodes (`next_unknown`).
    """

    kind: Literal["nearest_demonstration"] = "nearest_demonstration"
    demonstrations: Demonstrations
    match: Literal["sas", "ss"] = "sas"
    alpha: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.5, gt=0)
    per_dimension: bool = True

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedNearestDemonstration:
        """Raises DatasetError if the demonstrations' steps cannot be compared with those of the dataset."""
        demonstrations = evidence.demonstrations
        assert demonstrations is not None
        for name in ("observations", "actions"):
            ours, theirs = (getattr(t, name).shape[1:] for t in (trajectories, demonstrations))
            if ours != theirs:
                raise DatasetError(
                    f"{name} of the demonstrations are {theirs} a step and those of the dataset {ours}: a distance "
                    "between them is not defined. Name demonstrations of the same kind."
                )
        if trajectories.n_actions != demonstrations.n_actions:
            raise DatasetError(
                f"n_actions of the demonstrations is {demonstrations.n_actions} and that of the dataset "
                f"{trajectories.n_actions}: name demonstrations of the same kind."
            )
        steps = np.arange(demonstrations.n_steps)
        followed = steps[_next_known(demonstrations)]
        if len(followed) == 0:
            raise DatasetError(
                "the demonstrations have no step whose next observation was recorded: name longer ones, or some with "
                "final observations."
            )
        return FittedNearestDemonstration(
            self,
            transitions=KDTree(_points(demonstrations, followed, self.match)),
            beginnings=KDTree(_points(demonstrations, steps, self.match[:-1])),
        )


@dataclass(frozen=True, eq=False)
class FittedNearestDemonstration:
    """Demonstrations to search: by all that is compared, and by that without the next observation."""

    settings: NearestDemonstration
    transitions: KDTree
    beginnings: KDTree

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        """Rewards, and for each episode its mean distance and whether its last next observation is unknown."""
        settings = self.settings
        distances = np.empty(trajectories.n_steps)
        next_known = _next_known(trajectories)
        finished = 0
        for start in range(0, trajectories.n_steps, BLOCK):
            steps = np.arange(start, min(start + BLOCK, trajectories.n_steps))
            followed, last = steps[next_known[steps]], steps[~next_known[steps]]
            distances[followed] = self.transitions.query(_points(trajectories, followed, settings.match))[0]
            distances[last] = self.beginnings.query(_points(trajectories, last, settings.match[:-1]))[0]
            reached = int(trajectories.episode_index[steps[-1]])
            progress(reached - finished)
            finished = reached
        progress(trajectories.n_episodes - finished)
        rate = settings.beta
        if settings.per_dimension:
            rate /= math.prod(trajectories.actions.shape[1:])
        means = np.add.reduceat(distances, trajectories.offsets[:-1]) / trajectories.lengths
        diagnostics = pl.DataFrame({"mean_distance": means, "next_unknown": ~trajectories.final_observed})
        return Labels((settings.alpha * np.exp(-rate * distances)).astype(np.float32), diagnostics)


def _next_known(trajectories: Trajectories) -> np.ndarray:
    """[N] bool, whether the observation after each step was recorded."""
    recorded = np.ones(trajectories.n_steps, bool)
    recorded[trajectories.offsets[1:][~trajectories.final_observed] - 1] = False
    return recorded


def _points(trajectories: Trajectories, steps: np.ndarray, match: str) -> np.ndarray:
    """[n, D] float64, what is compared of the given steps: `s`, `sa`, `ss` or `sas`."""
    rows = trajectories.observation_rows(steps)
    columns = [trajectories.observations[rows]]
    if "a" in match:
        columns.append(action_columns(trajectories, steps))
    if len(match) > 1 and match.endswith("s"):
        columns.append(trajectories.observations[rows + 1])
    return np.concatenate([c.reshape(len(steps), math.prod(c.shape[1:])).astype(np.float64) for c in columns], axis=1)
