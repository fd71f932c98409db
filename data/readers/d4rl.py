"""D4RL: HDF5 with flat arrays, one row a step, episodes marked by flags.

Keys: `observations`, `actions`, `terminals`; optionally `rewards`, `timeouts`, `next_observations` and, in files that
assay wrote, `infos/next_observed`. Where episodes begin and end is decided by the rules in `data/readers/flat.py`.
Other keys (`infos/*`, `metadata/*`) are listed; their scalars and the file's attributes are kept as metadata, text as
text.

Files found in the wild are converted, on record: columns of shape (N, 1), flags as floats or integers, other byte
orders, float64 and float16 (all floats become float32, discrete actions int64). The attributes `action_count`,
`action_low` and `action_high` declare what actions are, unless the reader's settings do. Every key needs the same
number of rows, and all its values must be in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import h5py
import numpy as np
from pydantic import JsonValue

from data.findings import Finding, Severity
from data.readers.actions import action_kind, common_bounds
from data.readers.flat import Cutter, FlatReader, Rows
from data.readers.hdf5 import HDF5_SIGNATURE, arrays, check_array, open_hdf5, reading, text_of
from data.readers.observations import delivered_dtype
from data.readers.reader import Block, RefusedError, Space

NEEDED = ("observations", "actions", "terminals")
OBSERVED = "infos/next_observed"
KNOWN = (*NEEDED, "rewards", "timeouts", "next_observations", OBSERVED)

DELIVERED: dict[str, np.dtype[np.generic]] = {
    "terminals": np.dtype(bool),
    "timeouts": np.dtype(bool),
    OBSERVED: np.dtype(bool),
    "rewards": np.dtype(np.float32),
}

DECLARATIONS = ("action_count", "action_low", "action_high")

SLICE_BYTES = 8 << 20
"""Read about so much at a time, in whole chunks."""


class D4RL(FlatReader):
    """Reads D4RL-style HDF5."""

    kind: Literal["d4rl"] = "d4rl"

    def open(self, path: Path) -> D4RLSource:
        return D4RLSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return False
        with path.open("rb") as stream:
            if stream.read(8) != HDF5_SIGNATURE:
                return False
        with open_hdf5(path) as file:
            return sum(key in NEEDED for key in arrays(file, path)) >= 2


class D4RLSource:
    """An opened D4RL file."""

    format = "d4rl"

    def __init__(self, settings: D4RL, path: Path) -> None:
        self._settings, self._path = settings, path
        self.findings: list[Finding] = []
        self._file = open_hdf5(path)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    # ------------------------------------------------------------ structure

    def _open(self) -> None:
        found = arrays(self._file, self._path)
        keys = ", ".join(found) or "none"
        for key in NEEDED:
            if key not in found:
                raise self._refuse("missing-key", f"'{key}' is missing; keys present: {keys}.")
        self._arrays = {key: found[key] for key in KNOWN if key in found}
        for key, array in self._arrays.items():
            check_array(self._path, key, array)
        rows = {key: array.shape[0] if array.shape else 0 for key, array in self._arrays.items()}
        n = self.n_steps = rows["observations"]
        for key, count in rows.items():
            if count != n:
                raise self._refuse("uneven", f"{n:,} observations but {count:,} {key}: every key needs one row a step.")
        if n == 0:
            raise self._refuse("no-steps", "no steps: all arrays are empty.")
        observations = self._arrays["observations"]
        for key in ("observations", "actions"):
            if 0 in self._arrays[key].shape:
                raise self._refuse("shape", f"'{key}' has shape {self._arrays[key].shape}: no numbers.")
        if observations.dtype.kind not in "fiub":
            raise self._refuse("observations-dtype", f"'observations' are {observations.dtype}: expected numbers.")
        self.observation = Space(shape=observations.shape[1:] or (1,), dtype=observations.dtype.name)
        following = self._arrays.get("next_observations")
        if following is not None and following.shape != observations.shape:
            raise self._refuse(
                "shape",
                f"'next_observations' have shape {following.shape} and 'observations' {observations.shape}: "
                "they must be the same.",
            )
        for key in ("rewards", "terminals", "timeouts", OBSERVED):
            array = self._arrays.get(key)
            if array is not None and array.shape not in ((n,), (n, 1)):
                raise self._refuse("shape", f"'{key}' has shape {array.shape}; expected ({n},) or ({n}, 1).")
            if array is not None and array.dtype.kind not in "fiub":
                raise self._refuse("dtype", f"'{key}' is {array.dtype}: expected numbers.")
        self._understand_actions()
        self._note_conversions()
        others = [key for key in found if key not in KNOWN]
        if others:
            self._note("other-keys", f"keys not used: {', '.join(others)}.", count=len(others))
        self.metadata: Mapping[str, JsonValue] = self._read_metadata(found)

    def _note_conversions(self) -> None:
        for key, array in self._arrays.items():
            to = DELIVERED.get(key, self._kind.dtype if key == "actions" else delivered_dtype(array.dtype))
            if array.dtype != to:
                self._note("converted", f"'{key}': {array.dtype.str} converted to {to.name}.")
            if key in ("rewards", "terminals", "timeouts", OBSERVED) and array.ndim == 2:
                self._note("reshaped", f"'{key}': ({self.n_steps}, 1) read as ({self.n_steps},).")

    def _understand_actions(self) -> None:
        actions = self._arrays["actions"]
        with reading(self._path, "attributes"):
            attributes = {key: np.atleast_1d(self._file.attrs[key]) for key in DECLARATIONS if key in self._file.attrs}
        for key, values in attributes.items():
            if values.dtype.kind not in "fiu":
                raise self._refuse("attribute", f"attribute '{key}' is {values.dtype}: expected numbers.")
        declared = self._settings.n_actions
        if declared is None and "action_count" in attributes:
            counts = attributes["action_count"]
            declared = int(counts[0]) if len(counts) == 1 else tuple(int(c) for c in counts)
        bounds = self._settings.action_bounds
        if bounds is None and "action_low" in attributes and "action_high" in attributes:
            bounds = common_bounds(attributes["action_low"], attributes["action_high"], self.findings)
        highest = None
        if declared is None and actions.dtype.kind != "f":
            tops = [self._values("actions", rows).max(0) for rows in self._slices()]
            highest = tuple(int(h) for h in np.atleast_1d(np.max(tops, 0)))
        self._kind = action_kind(self._path, actions.shape[1:], actions.dtype, declared, bounds, highest, self.findings)
        self.action = Space(shape=self._kind.shape, dtype=actions.dtype.name)

    def _read_metadata(self, found: Mapping[str, h5py.Dataset]) -> dict[str, JsonValue]:
        with reading(self._path, "attributes"):
            kept = {key: text_of(value) for key, value in self._file.attrs.items()}
        for key, array in found.items():
            if key not in KNOWN and array.shape == ():
                with reading(self._path, key):
                    kept[key] = text_of(array[()])
        return kept

    # ------------------------------------------------------------ rows

    def _slices(self) -> Iterator[slice]:
        """Slices of whole chunks, of about SLICE_BYTES."""
        chunk = max([array.chunks[0] for array in self._arrays.values() if array.chunks] or [1])
        row = sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in self._arrays.values())
        rows = max(1, SLICE_BYTES // row // chunk) * chunk
        for start in range(0, self.n_steps, rows):
            yield slice(start, min(start + rows, self.n_steps))

    def _rows(self) -> Iterator[Rows]:
        for rows in self._slices():
            yield Rows(
                observations=self._observations("observations", rows),
                actions=self._kind.deliver(self._values("actions", rows), rows.start),
                rewards=self._rewards(rows) if "rewards" in self._arrays else None,
                terminals=self._flags("terminals", rows),
                timeouts=self._flags("timeouts", rows) if "timeouts" in self._arrays else None,
                next_observations=self._observations("next_observations", rows)
                if "next_observations" in self._arrays
                else None,
                next_observed=self._flags(OBSERVED, rows) if OBSERVED in self._arrays else None,
            )

    def _values(self, key: str, rows: slice) -> np.ndarray:
        with reading(self._path, key):
            values: np.ndarray = self._arrays[key][rows]
        return values

    def _observations(self, key: str, rows: slice) -> np.ndarray:
        values = self._values(key, rows)
        values = values.reshape(len(values), *self.observation.shape)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, delivered_dtype(values.dtype))

    def _rewards(self, rows: slice) -> np.ndarray:
        with np.errstate(over="ignore"):
            return self._values("rewards", rows).reshape(-1).astype(np.float32, copy=False)

    def _flags(self, key: str, rows: slice) -> np.ndarray:
        values = self._values(key, rows).reshape(-1)
        if values.dtype.kind == "b":
            return values
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            raise self._refuse(
                "flag", f"'{key}' is {values[wrong[0]]} at row {rows.start + wrong[0]:,}: flags are 0 or 1."
            )
        flags: np.ndarray = values == 1
        return flags

    def blocks(self) -> Iterator[Block]:
        """All episodes, cut by the rules of `data/readers/flat.py`."""
        return Cutter(self._settings, self._kind, self._path, self.findings).blocks(self._rows)

    # ------------------------------------------------------------ findings

    def _note(self, code: str, message: str, severity: Severity = Severity.NOTE, count: int = 1) -> None:
        self.findings.append(Finding(code=code, severity=severity, message=message, count=count))

    def _refuse(self, code: str, message: str) -> RefusedError:
        finding = Finding(code=code, severity=Severity.ERROR, message=message)
        self.findings.append(finding)
        return RefusedError(self._path, self.findings)
