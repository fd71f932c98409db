"""What actions are: discrete or continuous by dtype and declaration, never by the values that happen to occur."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.findings import Finding, Severity
from data.readers.reader import Refused


@dataclass(frozen=True)
class ActionKind:
    """How actions are delivered: see `Trajectories.n_actions` and `action_bounds`. shape: of one action."""

    shape: tuple[int, ...]
    n_actions: tuple[int, ...] | None = None
    bounds: tuple[float, float] | None = None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """int64 for discrete actions, float32 for continuous ones."""
        return np.dtype(np.float32 if self.n_actions is None else np.int64)

    def deliver(self, actions: np.ndarray) -> np.ndarray:
        """Actions [n, ...] of the source in the delivered shape and dtype."""
        return np.ascontiguousarray(actions.reshape(len(actions), *self.shape), self.dtype)


def action_kind(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    declared: int | tuple[int, ...] | None,
    bounds: tuple[float, float] | None,
    highest: tuple[int, ...] | None,
    findings: list[Finding],
) -> ActionKind:
    """The kind of actions whose rows have `shape` and `dtype` in the source.

    declared: number of choices, if the file or the person says it. bounds: of continuous actions, likewise.
    highest: for integers without a declaration, the highest id of each dimension; one more is then taken, and said.
    Raises Refused where dtype and declaration do not fit.
    """
    if dtype.kind not in "fiub":
        message = f"'actions' are {dtype}: expected numbers."
        raise Refused(path, Finding(code="actions-dtype", severity=Severity.ERROR, message=message))
    if dtype.kind == "f" and declared is None:
        if not shape:
            findings.append(
                Finding(
                    code="reshaped",
                    severity=Severity.NOTE,
                    message="'actions' hold one float a step: read as vectors of one dimension.",
                )
            )
        return ActionKind(shape=shape or (1,), bounds=bounds)
    if len(shape) > 1:
        message = f"'actions' have rows of shape {shape}: discrete actions are one integer, or a vector of integers."
        raise Refused(path, Finding(code="actions-shape", severity=Severity.ERROR, message=message))
    squeezed = () if shape == (1,) else shape
    n_dimensions = int(np.prod(squeezed))
    if declared is not None:
        counts = (declared,) * n_dimensions if isinstance(declared, int) else declared
        if len(counts) != n_dimensions or min(counts) < 1:
            message = f"n_actions = {declared} for actions of {n_dimensions} dimensions: one positive count for each."
            raise Refused(path, Finding(code="n-actions", severity=Severity.ERROR, message=message))
        return ActionKind(shape=squeezed, n_actions=counts)
    assert highest is not None
    counts = tuple(h + 1 for h in highest)
    findings.append(
        Finding(
            code="n-actions-taken",
            severity=Severity.WARNING,
            message=f"integer actions without a declared number of choices: {', '.join(map(str, counts))} taken, one "
            "more than the highest id. If there are more, say so with n_actions.",
        )
    )
    return ActionKind(shape=squeezed, n_actions=counts)
