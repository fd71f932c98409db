"""Labels: what each step is worth by one account, or what was done there, beside a dataset and never inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import polars as pl

from data.digests import Json, digest_of
from data.errors import DatasetError
from data.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class Labels:
    """One reward a step for some trajectories, and what the labeler has to say about each episode.

    rewards: [N] float32, row for row with the steps.
    diagnostics: one row an episode, in columns of the labeler's choice (iterations, marginal error), or None.
    """

    rewards: np.ndarray
    diagnostics: pl.DataFrame | None = None

    def __post_init__(self) -> None:
        if self.rewards.dtype != np.float32 or self.rewards.ndim != 1:
            found = f"{self.rewards.dtype} {self.rewards.shape}"
            raise DatasetError(f"labels must be float32 with one value a step; found {found}.")

    def check(self, trajectories: Trajectories) -> None:
        """Raise DatasetError, naming episode and step, unless there is one finite label for each step."""
        if len(self.rewards) != trajectories.n_steps:
            raise DatasetError(f"{len(self.rewards):,} labels for {trajectories.n_steps:,} steps.")
        bad = np.flatnonzero(~np.isfinite(self.rewards))
        if len(bad):
            episode = int(trajectories.episode_index[bad[0]])
            raise DatasetError(
                f"label {self.rewards[bad[0]]} at episode {episode}, step {bad[0] - trajectories.offsets[episode]} "
                f"({len(bad):,} labels are not finite). A label is always a finite number."
            )


@dataclass(frozen=True, eq=False)
class ActionLabels:
    """One action a step for some trajectories whose own are missing or not to be believed.

    actions: [N, ...], of the dtype and row shape of the trajectories' actions. diagnostics: as in `Labels`.
    """

    actions: np.ndarray
    diagnostics: pl.DataFrame | None = None

    def check(self, trajectories: Trajectories) -> None:
        """Raise DatasetError, naming episode and step, unless there is one sound action for each step."""
        theirs = trajectories.actions
        if self.actions.shape != theirs.shape or self.actions.dtype != theirs.dtype:
            raise DatasetError(
                f"action labels are {self.actions.dtype} {self.actions.shape} and the dataset's actions "
                f"{theirs.dtype} {theirs.shape}: they must be alike."
            )
        rows = self.actions.reshape(len(self.actions), -1)
        if trajectories.n_actions is None:
            wrong = ~np.isfinite(rows)
        else:
            wrong = (rows < 0) | (rows >= np.array(trajectories.n_actions))
        bad = np.flatnonzero(wrong.any(1))
        if len(bad):
            episode = int(trajectories.episode_index[bad[0]])
            raise DatasetError(
                f"action label {self.actions[bad[0]]} at episode {episode}, step "
                f"{bad[0] - trajectories.offsets[episode]} ({len(bad):,} such steps) is no action of this dataset."
            )


AnyLabels: TypeAlias = Labels | ActionLabels


def episode_returns(rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[E] float64, the undiscounted sum of rewards of each episode, summed in float64 whatever the dtype.

    rewards: [N]. offsets: [E + 1].
    """
    return np.add.reduceat(rewards.astype(np.float64), offsets[:-1]) if len(offsets) > 1 else np.zeros(0)


def label_id(dataset_digest: str, labeler: Mapping[str, Json], version: int, evidence_digest: str) -> str:
    """Identity of a label set: the same dataset, configuration, code version and evidence give the same labels.

    labeler: the configuration as JSON, without the fields that merely name where evidence is found.
    """
    return digest_of({"dataset": dataset_digest, "labeler": labeler, "version": version, "evidence": evidence_digest})
