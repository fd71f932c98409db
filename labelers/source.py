"""`source`: the rewards that the file itself gave, the reference that other labels are compared with."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from data.errors import ConfigurationError
from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Evidence, KnownRewards
from labelers.labeler import Labeler


class Source(Labeler):
    """The file's own rewards, unchanged; its evidence is those rewards."""

    kind: Literal["source"] = "source"
    rewards: KnownRewards = KnownRewards()

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedSource:
        return FittedSource()


class FittedSource:
    """Repeats what is known."""

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        if known is None:
            raise ConfigurationError("source repeats the rewards of the file, and these trajectories came without any.")
        progress(trajectories.n_episodes)
        return Labels(known)
