"""`unlabelled_zero`: rewards where they are known, the least there is everywhere else, and no model at all.

UDS: Yu, Kumar, Chebotar, Hausman, Finn and Levine, "How to leverage unlabeled data in offline reinforcement learning"
(2022). The paper gives unlabelled transitions reward 0, the lowest that its tasks give. Where rewards can be negative 0
is not that, and would praise what nobody has seen; so by default the lowest known reward is given (as ExPLORe's `min`
baseline does), which is 0 on the paper's tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Evidence, LabelledTransitions
from labelers.labeler import LearningLabeler


class UnlabelledZero(LearningLabeler):
    """Keep known rewards, and give all other steps one and the same.

    rewards: which are known. fill: `minimum`, the lowest known reward; `zero`, 0 as the paper says.
    """

    kind: Literal["unlabelled_zero"] = "unlabelled_zero"
    rewards: LabelledTransitions = LabelledTransitions()
    fill: Literal["minimum", "zero"] = "minimum"

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedUnlabelledZero:
        assert evidence.rewards is not None
        lowest = float(np.nanmin(evidence.rewards))
        return FittedUnlabelledZero(0.0 if self.fill == "zero" else lowest, {"lowest_known_reward": lowest})

    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> FittedUnlabelledZero:
        return FittedUnlabelledZero(float(state["fill"]), report)


@dataclass(eq=False)
class FittedUnlabelledZero:
    """What steps without a known reward are given."""

    fill: float
    report: dict[str, JsonValue]

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        progress(trajectories.n_episodes)
        if known is None:
            return Labels(np.full(trajectories.n_steps, self.fill, np.float32))
        return Labels(np.where(np.isnan(known), np.float32(self.fill), known))

    def state(self) -> dict[str, Tensor]:
        return {"fill": torch.tensor(self.fill)}
