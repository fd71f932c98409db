"""Sources of flat arrays, one row a step: what the arrays must be, and how their rows are delivered.

Arrays are told by role: `observations`, `actions`, `terminals`; optionally `rewards`, `timeouts`, `next_observations`
and `next_observed`, or `dones` where a format says what they mean; which key of the file plays which, the format says.
Every array needs the same number of rows.
Converted, on record: columns of shape (N, 1), flags as floats or integers, other byte orders, float64 and float16 (all
floats become float32, discrete actions int64). Where episodes begin and end is decided by the rules in
`data/readers/flat.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from pydantic import JsonValue

from data.findings import Finding, Severity
from data.readers.actions import ActionKind, action_kind
from data.readers.flat import Cutter, FlatReader, Rows
from data.readers.observations import delivered_dtype
from data.readers.reader import Block, RefusedError, Space

COLUMNS = ("rewards", "terminals", "timeouts", "dones", "next_observed")
"""Roles of arrays with one number a row."""

FLAGS = COLUMNS[1:]

SLICE_BYTES = 8 << 20
"""Read about so much at a time, in whole chunks."""


class Array(Protocol):
    """An array in a file, of which slices of rows are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class FlatSource(ABC):
    """Base of opened sources of flat arrays; see `Source` for the attributes.

    A subclass opens its file and calls `_understand`.
    """

    format: str
    metadata: Mapping[str, JsonValue]

    def __init__(self, settings: FlatReader, path: Path) -> None:
        self._settings, self._path = settings, path
        self.findings: list[Finding] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def blocks(self) -> Iterator[Block]:
        """All episodes, cut by the rules of `data/readers/flat.py`."""
        return Cutter(self._settings, self._kind, self._path, self.findings).blocks(self._rows)

    # ------------------------------------------------------------ structure

    def _understand(
        self,
        arrays: Mapping[str, Array],
        keys: Mapping[str, str],
        declared: int | tuple[int, ...] | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Check the arrays and decide what observations and actions are.

        arrays, keys: of each role, the array, and what the file calls it. declared, bounds: what the file says of its
        actions, see `action_kind`. Raises RefusedError.
        """
        self._arrays, self._keys = arrays, keys
        rows = {role: array.shape[0] if array.shape else 0 for role, array in arrays.items()}
        n = self.n_steps = rows["observations"]
        for role, count in rows.items():
            if count != n:
                named = "" if keys["observations"] == "observations" else f" ('{keys['observations']}')"
                raise self._refuse(
                    "uneven", f"{n:,} observations{named} but {count:,} {keys[role]}: every key needs one row a step."
                )
        if n == 0:
            raise self._refuse("no-steps", "no steps: all arrays are empty.")
        observations, following = arrays["observations"], arrays.get("next_observations")
        for role in ("observations", "actions"):
            if 0 in arrays[role].shape:
                raise self._refuse("shape", f"'{keys[role]}' has shape {arrays[role].shape}: no numbers.")
        for role in ("observations", "next_observations"):
            if role in arrays and arrays[role].dtype.kind not in "fiub":
                message = f"'{keys[role]}' are {arrays[role].dtype}: expected numbers."
                raise self._refuse("observations-dtype", message)
        self.observation = Space(shape=observations.shape[1:] or (1,), dtype=observations.dtype.name)
        if following is not None and following.shape != observations.shape:
            raise self._refuse(
                "shape",
                f"'{keys['next_observations']}' have shape {following.shape} and '{keys['observations']}' "
                f"{observations.shape}: they must be the same.",
            )
        for role in COLUMNS:
            array = arrays.get(role)
            if array is not None and array.shape not in ((n,), (n, 1)):
                raise self._refuse("shape", f"'{keys[role]}' has shape {array.shape}; expected ({n},) or ({n}, 1).")
            if array is not None and array.dtype.kind not in "fiub":
                raise self._refuse("dtype", f"'{keys[role]}' is {array.dtype}: expected numbers.")
        self._understand_actions(declared, bounds)
        self._note_conversions()

    def _understand_actions(self, declared: int | tuple[int, ...] | None, bounds: tuple[float, float] | None) -> None:
        actions = self._arrays["actions"]
        declared = declared if self._settings.n_actions is None else self._settings.n_actions
        bounds = bounds if self._settings.action_bounds is None else self._settings.action_bounds
        highest = None
        if declared is None and actions.dtype.kind in "iub":
            tops = [self._values("actions", rows).max(0) for rows in self._slices()]
            highest = tuple(int(h) for h in np.atleast_1d(np.max(tops, 0)))
        self._kind: ActionKind = action_kind(
            self._path, actions.shape[1:], actions.dtype, declared, bounds, highest, self.findings
        )
        self.action = Space(shape=self._kind.shape, dtype=actions.dtype.name)

    def _note_conversions(self) -> None:
        for role, array in self._arrays.items():
            if role in COLUMNS:
                to: np.dtype[np.generic] = np.dtype(bool if role in FLAGS else np.float32)
            else:
                to = self._kind.dtype if role == "actions" else delivered_dtype(array.dtype)
            if array.dtype != to:
                self._note("converted", f"'{self._keys[role]}': {array.dtype.str} converted to {to.name}.")
            if role in COLUMNS and len(array.shape) == 2:
                self._note("reshaped", f"'{self._keys[role]}': ({self.n_steps}, 1) read as ({self.n_steps},).")

    # ------------------------------------------------------------ rows

    def _chunk(self) -> int:
        """So many rows are packed together in the file."""
        return 1

    def _slices(self) -> Iterator[slice]:
        """Slices of whole chunks, of about SLICE_BYTES."""
        chunk = self._chunk()
        row = sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in self._arrays.values())
        rows = max(1, SLICE_BYTES // row // chunk) * chunk
        for start in range(0, self.n_steps, rows):
            yield slice(start, min(start + rows, self.n_steps))

    def _rows(self) -> Iterator[Rows]:
        for rows in self._slices():
            terminals, timeouts = self._ends(rows)
            yield Rows(
                observations=self._observations("observations", rows),
                actions=self._kind.deliver(self._values("actions", rows), rows.start),
                rewards=self._rewards(rows) if "rewards" in self._arrays else None,
                terminals=terminals,
                timeouts=timeouts,
                next_observations=self._observations("next_observations", rows)
                if "next_observations" in self._arrays
                else None,
                next_observed=self._flags("next_observed", rows) if "next_observed" in self._arrays else None,
            )

    def _ends(self, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Terminals and timeouts [n] of these rows; the latter None if the file has none."""
        timeouts = self._flags("timeouts", rows) if "timeouts" in self._arrays else None
        return self._flags("terminals", rows), timeouts

    def _values(self, role: str, rows: slice) -> np.ndarray:
        return self._arrays[role][rows]

    def _observations(self, role: str, rows: slice) -> np.ndarray:
        values = self._values(role, rows)
        values = values.reshape(len(values), *self.observation.shape)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, delivered_dtype(values.dtype))

    def _rewards(self, rows: slice) -> np.ndarray:
        with np.errstate(over="ignore"):
            return self._values("rewards", rows).reshape(-1).astype(np.float32, copy=False)

    def _flags(self, role: str, rows: slice) -> np.ndarray:
        values = self._values(role, rows).reshape(-1)
        if values.dtype.kind == "b":
            values = values.view(np.uint8)  # in a damaged file, a boolean may be any byte
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            message = f"'{self._keys[role]}' is {values[wrong[0]]} at row {rows.start + wrong[0]:,}: flags are 0 or 1."
            raise self._refuse("flag", message)
        flags: np.ndarray = values == 1
        return flags

    # ------------------------------------------------------------ findings

    def _note(self, code: str, message: str, severity: Severity = Severity.NOTE, count: int = 1) -> None:
        self.findings.append(Finding(code=code, severity=severity, message=message, count=count))

    def _refuse(self, code: str, message: str) -> RefusedError:
        self._note(code, message, Severity.ERROR)
        return RefusedError(self._path, self.findings)
