"""What actions are: discrete or continuous by dtype and declaration, never by the values that happen to occur."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.errors import DatasetError
from data.findings import Finding, Severity
from data.readers.reader import RefusedError


@dataclass(frozen=True)
class ActionKind:
    """How actions are delivered: see `Trajectories.n_actions` and `action_bounds`. shape: of one action."""

    path: Path
    shape: tuple[int, ...]
    n_actions: tuple[int, ...] | None = None
    bounds: tuple[float, float] | None = None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """int64 for discrete actions, float32 for continuous ones."""
        return np.dtype(np.float32 if self.n_actions is None else np.int64)

    def deliver(self, actions: np.ndarray, first_row: int) -> np.ndarray:
        """Actions [n, ...] of the source in the delivered shape and dtype; first_row: where they begin, for messages.

        Raises DatasetError for a discrete action that is no whole number.
        """
        actions = actions.reshape(len(actions), *self.shape)
        if self.n_actions is not None and actions.dtype.kind == "f":
            wrong = np.flatnonzero((actions != np.rint(actions)).reshape(len(actions), -1).any(1))
            if len(wrong):
                raise DatasetError(
                    f"{self.path.name}: 'actions' is {actions[wrong[0]]} at row {first_row + wrong[0]:,}: declared "
                    "discrete by n_actions, it must be a whole number."
                )
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(actions, self.dtype)


def common_bounds(low: np.ndarray, high: np.ndarray, findings: list[Finding]) -> tuple[float, float] | None:
    """The bounds [d] declared for each dimension, if they are finite and the same for all; None, said, if not."""
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return None
    if np.ptp(low) == 0 and np.ptp(high) == 0:
        return float(low.flat[0]), float(high.flat[0])
    message = (
        f"the declared action bounds differ between dimensions ({low.tolist()} to {high.tolist()}): they are not "
        "checked and not kept. Scale the actions to common bounds, or declare bounds with action_bounds."
    )
    findings.append(Finding(code="action-bounds-differ", severity=Severity.WARNING, message=message))
    return None


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
    Raises RefusedError where dtype and declaration do not fit.
    """
    if bounds is not None and not bounds[0] < bounds[1]:
        raise _refused(path, findings, "action-bounds", f"action bounds {bounds[0]:g} to {bounds[1]:g}: low first.")
    if dtype.kind not in "fiub":
        message = f"'actions' are {dtype}: expected numbers."
        raise _refused(path, findings, "actions-dtype", message)
    if dtype.kind == "f" and declared is None:
        if not shape:
            findings.append(
                Finding(
                    code="reshaped",
                    severity=Severity.NOTE,
                    message="'actions' hold one float a step: read as vectors of one dimension.",
                )
            )
        return ActionKind(path, shape=shape or (1,), bounds=bounds)
    if len(shape) > 1:
        message = f"'actions' have rows of shape {shape}: discrete actions are one integer, or a vector of integers."
        raise _refused(path, findings, "actions-shape", message)
    squeezed = () if shape == (1,) else shape
    n_dimensions = int(np.prod(squeezed))
    if declared is not None:
        counts = (declared,) * n_dimensions if isinstance(declared, int) else declared
        if len(counts) != n_dimensions or min(counts) < 1:
            message = f"n_actions = {declared} for actions of {n_dimensions} dimensions: one positive count for each."
            raise _refused(path, findings, "n-actions", message)
        return ActionKind(path, shape=squeezed, n_actions=counts)
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
    return ActionKind(path, shape=squeezed, n_actions=counts)


def _refused(path: Path, findings: list[Finding], code: str, message: str) -> RefusedError:
    findings.append(Finding(code=code, severity=Severity.ERROR, message=message))
    return RefusedError(path, findings)
