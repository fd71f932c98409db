"""What a reader is: a configuration that opens a file of one format as a stream of whole episodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
from pydantic import JsonValue

from data.config import Config
from data.errors import DatasetError
from data.findings import Finding, Severity
from data.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class Block:
    """Some whole episodes, in the order of the source.

    rewards: [N] float32, row for row with the steps, or None if the source has none (then no block has any).
        Sources in float64 are converted, and a finding says so.
    """

    trajectories: Trajectories
    rewards: np.ndarray | None


class Space(Config):
    """Shape of one observation or action, and the dtype the source gives it (before any conversion)."""

    shape: tuple[int, ...]
    dtype: str


class Source(Protocol):
    """An opened file; a context manager that closes it.

    format: the reader's kind.
    n_steps: steps in the file before anything is dropped, for progress bars; None if unknown.
    observation: space of observations, or one for each key of dict observations. action: space of actions.
    metadata: what the file says about itself (environment, algorithm), text as text.
    findings: what was noticed or decided; complete once `blocks` is exhausted.
    """

    @property
    def format(self) -> str: ...

    @property
    def n_steps(self) -> int | None: ...

    @property
    def observation(self) -> Space | Mapping[str, Space]: ...

    @property
    def action(self) -> Space: ...

    @property
    def metadata(self) -> Mapping[str, JsonValue]: ...

    @property
    def findings(self) -> list[Finding]: ...

    def blocks(self) -> Iterator[Block]:
        """All episodes, a few at a time, each block small enough for memory. Called once.

        Raises RefusedError where the file cannot be understood, at the latest after the last block.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Reader(Config):
    """Base of every reader's configuration; a subclass adds `kind` and the settings of its format.

    version: raised when the same file and settings start to give other trajectories; part of the ingestion's key.
    n_actions: number of choices where actions are discrete (one for each dimension, or one for all), if the file does
        not say it. Declaring it makes whole numbers stored as floats discrete.
    action_bounds: lowest and highest value of every continuous action dimension, if the file does not say it.
    out_of_bounds: what to do with continuous actions beyond the bounds by more than rounding.
    not_finite: what to do with NaN or infinity in observations and actions. `leave_out` drops the episodes that hold
        any, in rewards too, and counts them. Under `refuse`, NaN among rewards alone costs only the `source` labels.
    """

    version: ClassVar[int] = 1
    kind: str
    n_actions: int | tuple[int, ...] | None = None
    action_bounds: tuple[float, float] | None = None
    out_of_bounds: Literal["refuse", "clip"] = "refuse"
    not_finite: Literal["refuse", "leave_out"] = "refuse"

    @abstractmethod
    def open(self, path: Path) -> Source:
        """Open `path` and check its structure. Raises DatasetError naming file and key."""

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether the content of `path` (a file, or a folder for formats that are folders) looks like this format."""


class RefusedError(DatasetError):
    """A source that is refused.

    findings: all there was to say about it up to then, the reasons (of severity `error`) among them, for checks that
    list problems.
    """

    def __init__(self, path: Path, findings: Sequence[Finding]) -> None:
        reasons = [f.message for f in findings if f.severity is Severity.ERROR]
        super().__init__(f"{path.name}: {' '.join(reasons)}")
        self.findings = tuple(findings)
