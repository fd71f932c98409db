"""D4RL: HDF5 with flat arrays, one row a step, episodes marked by flags.

Keys: `observations`, `actions`, `terminals`; optionally `rewards`, `timeouts`, `next_observations` and, in files that
assay wrote, `infos/next_observed`. Dumps of d3rlpy 1 have this layout and mark the end of every episode by
`episode_terminals` in place of `timeouts`. Where episodes begin and end is decided by the rules in
`data/readers/flat.py`.
Other keys (`infos/*`, `metadata/*`) are listed; their scalars and the file's attributes are kept as metadata, text as
text.

Files found in the wild are converted, on record: columns of shape (N, 1), flags as floats or integers, other byte
orders, float64 and float16 (all floats become float32, discrete actions int64). The attributes `action_count`,
`action_low` and `action_high` declare what actions are, unless the reader's settings do. Every key needs the same
number of rows, and all its values must be in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import JsonValue

from data.readers.actions import common_bounds
from data.readers.files import closed_on_failure
from data.readers.flat import FlatReader
from data.readers.flat_source import FlatSource
from data.readers.hdf5 import arrays, attributes_of, check_array, is_hdf5, open_hdf5, reading, value_of

NEEDED = ("observations", "actions", "terminals")
KEYS = {key: key for key in (*NEEDED, "rewards", "timeouts", "next_observations")} | {
    "next_observed": "infos/next_observed",
    "dones": "episode_terminals",
}
"""The key of each role."""

DECLARATIONS = ("action_count", "action_low", "action_high")


class D4RL(FlatReader):
    """Reads D4RL-style HDF5."""

    kind: Literal["d4rl"] = "d4rl"

    def open(self, path: Path) -> D4RLSource:
        return D4RLSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not is_hdf5(path):
            return False
        with open_hdf5(path) as file:
            return sum(key in NEEDED for key in arrays(file, path)) >= 2


class D4RLSource(FlatSource):
    """An opened D4RL file."""

    format = "d4rl"

    def __init__(self, settings: D4RL, path: Path) -> None:
        super().__init__(settings, path)
        self._file = open_hdf5(path)
        with closed_on_failure(self._file):
            self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        found = arrays(self._file, self._path)
        for key in NEEDED:
            if key not in found:
                raise self._refuse("missing-key", f"'{key}' is missing; keys present: {', '.join(found) or 'none'}.")
        present = {role: found[key] for role, key in KEYS.items() if key in found}
        for role, array in present.items():
            check_array(self._path, KEYS[role], array)
        self._chunks = [array.chunks[0] for array in present.values() if array.chunks]
        self._understand(present, KEYS, *self._declarations())
        if "dones" in present:
            self._note("ends-taken", f"'{KEYS['dones']}' without 'terminals' or 'timeouts' are taken as truncated.")
        others = [key for key in found if key not in KEYS.values()]
        if others:
            self._note("other-keys", f"keys not used: {', '.join(others)}.", count=len(others))
        self.metadata = self._read_metadata({key: found[key] for key in others})

    def _ends(self, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        terminals, timeouts = super()._ends(rows)
        if "dones" in self._arrays:
            ended = self._flags("dones", rows) & ~terminals
            timeouts = ended if timeouts is None else timeouts | ended
        return terminals, timeouts

    def _declarations(self) -> tuple[int | tuple[int, ...] | None, tuple[float, float] | None]:
        """Number of actions and bounds, as the attributes declare them."""
        with reading(self._path, "attributes"):
            attributes = {key: np.atleast_1d(self._file.attrs[key]) for key in DECLARATIONS if key in self._file.attrs}
        for key, values in attributes.items():
            if values.dtype.kind not in "fiu":
                raise self._refuse("attribute", f"attribute '{key}' is {values.dtype}: expected numbers.")
        declared: int | tuple[int, ...] | None = None
        if "action_count" in attributes:
            counts = attributes["action_count"]
            declared = int(counts[0]) if len(counts) == 1 else tuple(int(c) for c in counts)
        bounds = None
        if "action_low" in attributes and "action_high" in attributes and self._settings.action_bounds is None:
            bounds = common_bounds(attributes["action_low"], attributes["action_high"], self.findings)
        return declared, bounds

    def _read_metadata(self, others: Mapping[str, h5py.Dataset]) -> dict[str, JsonValue]:
        with reading(self._path, "attributes"):
            kept = attributes_of(self._file)
        for key, array in others.items():
            if array.shape == ():
                with reading(self._path, key):
                    kept[key] = value_of(array)
        return kept

    def _chunk(self) -> int:
        return max(self._chunks, default=1)

    def _values(self, role: str, rows: slice) -> np.ndarray:
        with reading(self._path, KEYS[role]):
            return super()._values(role, rows)
