"""`zero`: no step is worth anything. The floor: what a policy reaches from the data alone, whatever it is told."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Evidence
from labelers.labeler import Labeler


class Zero(Labeler):
    """Reward 0 on every step."""

    kind: Literal["zero"] = "zero"

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedZero:
        return FittedZero()


class FittedZero:
    """Says 0."""

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        progress(trajectories.n_episodes)
        return Labels(np.zeros(trajectories.n_steps, np.float32))
