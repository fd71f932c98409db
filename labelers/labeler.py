"""What a labeler is: a configuration that is fitted to data and evidence, and then says what each step is worth."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
import safetensors
import torch
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from data.config import Config
from data.errors import StoreError
from data.labels import AnyLabels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Evidence, EvidenceSpec, Reference
from labelers.transforms import Transform

FORMAT = "assay-labeler/1"


class FittedLabeler(Protocol):
    """A labeler that has learned what it had to."""

    def label(
        self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent
    ) -> AnyLabels:
        """One finite float32 reward for each step; or one action, from the labelers whose `column` is actions.

        known: what the evidence says of just these steps, `Evidence.known`; None if that is nothing.
        The answer for an episode depends on that episode and what is known of it alone: any sharding and any order of
        episodes give the same labels.
        """


@runtime_checkable
class LearnedLabeler(FittedLabeler, Protocol):
    """A fitted labeler whose fitting is worth keeping; `save` and `LearningLabeler.load` keep it.

    report: what fitting came to (held-out errors, calibration, counts), for manifests.
    """

    report: dict[str, JsonValue]

    def state(self) -> dict[str, Tensor]:
        """All that was learned, by name, on any device; `LearningLabeler.restore` is its inverse, exact to the bit."""


class Labeler(Config):
    """Base of every labeler's configuration; a subclass adds `kind`, its settings, and at most one evidence field.

    version: raised when the same configuration starts to give other labels; part of the label id.
    column: what the labels are.
    transforms: applied in order to what the labeler says, recorded, never silent.
    """

    version: ClassVar[int] = 1
    column: ClassVar[Literal["rewards", "actions"]] = "rewards"
    kind: str
    transforms: tuple[Transform, ...] = ()

    @property
    def evidence_field(self) -> str | None:
        """Name of the field of this configuration that names evidence, if it has one."""
        fields = [name for name, value in self if isinstance(value, EvidenceSpec)]
        assert len(fields) <= 1, f"{self.kind} names evidence twice"
        return fields[0] if fields else None

    @property
    def evidence_spec(self) -> EvidenceSpec | None:
        """What that field says."""
        spec = None if self.evidence_field is None else getattr(self, self.evidence_field)
        assert spec is None or isinstance(spec, EvidenceSpec)
        return spec

    @property
    def references(self) -> list[Reference]:
        """Every dataset and label set that this labeler will look up."""
        spec = self.evidence_spec
        return [] if spec is None or self.evidence_field is None else spec.references(self.evidence_field)

    def beside(self, folder: Path) -> Self:
        """The same, with relative paths in its evidence taken from `folder`."""
        spec, field = self.evidence_spec, self.evidence_field
        return self if spec is None or field is None else self.model_copy(update={field: spec.beside(folder)})

    def identity(self) -> dict[str, JsonValue]:
        """The configuration as it enters the label id: without evidence, known by content, and without transforms."""
        return self.model_dump(
            mode="json", exclude={"transforms", *([self.evidence_field] if self.evidence_field else [])}
        )

    @abstractmethod
    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedLabeler:
        """Learn from trajectories and the declared evidence; the same input gives the same bits on one machine.

        Raises ConfigurationError or DatasetError where evidence and data do not fit together.
        """


class LearningLabeler(Labeler):
    """Base of the labelers that learn something: what they have learned can be saved and loaded."""

    @abstractmethod
    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> LearnedLabeler: ...

    @abstractmethod
    def restore(
        self, state: Mapping[str, Tensor], report: dict[str, JsonValue], *, device: torch.device
    ) -> LearnedLabeler:
        """The fitted labeler that gave `state` and `report`. Raises KeyError or ValueError if they do not fit."""

    def save(self, fitted: LearnedLabeler, path: Path) -> None:
        """Write what this configuration has learned: a safetensors file that names configuration and report."""
        metadata = {
            "format": FORMAT,
            "labeler": json.dumps({"version": self.version, **self.identity()}),
            "report": json.dumps(fitted.report),
        }
        save_file({name: t.detach().cpu().contiguous() for name, t in fitted.state().items()}, path, metadata)

    def load(self, path: Path, *, device: torch.device) -> LearnedLabeler:
        """What `save` wrote; it gives the same labels. Raises StoreError if it is of another labeler or not whole."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        except (OSError, safetensors.SafetensorError) as error:
            raise StoreError(f"{path}: the fitted labeler cannot be read: {error}. Fit it again.") from error
        ours = json.dumps({"version": self.version, **self.identity()})
        if metadata.get("format") != FORMAT or metadata.get("labeler") != ours:
            raise StoreError(
                f"{path}: fitted by {metadata.get('labeler', 'something else')}, and asked for {ours}. "
                "Fit it again, or load it with the configuration that it was fitted with."
            )
        try:
            return self.restore(state, json.loads(metadata["report"]), device=device)
        except (KeyError, ValueError) as error:
            raise StoreError(f"{path}: the fitted labeler is not whole: {error}. Fit it again.") from error
