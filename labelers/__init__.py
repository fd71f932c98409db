"""Labelers: what a step is worth, and who says so. One file each; the registry is the union below."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from labelers.inverse_dynamics import InverseDynamics
from labelers.multiple_instance import MultipleInstance
from labelers.nearest_demonstration import NearestDemonstration
from labelers.optimal_transport import OptimalTransport
from labelers.optimistic import Optimistic
from labelers.preference import Preference
from labelers.recorded import Recorded
from labelers.reward_model import RewardModel
from labelers.source import Source
from labelers.unlabelled_zero import UnlabelledZero
from labelers.zero import Zero

AnyLabeler: TypeAlias = Annotated[
    Source
    | Zero
    | Recorded
    | OptimalTransport
    | NearestDemonstration
    | RewardModel
    | UnlabelledZero
    | Optimistic
    | MultipleInstance
    | Preference
    | InverseDynamics,
    Field(discriminator="kind"),
]
