"""Flat arrays in an `.npz` file, or in a folder of `.npy` files: one row a step, episodes marked by flags.

    observations        also observation, obs, states, state
    actions             also action, acts, act
    rewards             also reward; may be missing
    next_observations   also next_observation, next_obs, next_states, next_state; may be missing
    terminals           the task ended; also terminal, terminated, terminations
    timeouts            the recording stopped; also timeout, truncated, truncations
    dones               the episode ended, one way or the other; also done

Arrays of other names are named by the setting `keys`; which were taken is on record, and the rest are listed. `dones`
stand for whichever of `terminals` and `timeouts` is missing, where the other is not set; if both are missing, for what
the setting `ends` says; if both are there, they are not used. Where episodes begin and end is then decided by the rules
in `data/readers/flat.py`, which also cut data without any flags if `next_observations` or `max_episode_steps` allow it.

Arrays are read in pieces, but for those in Fortran order, which are held in memory. Images stay uint8. Arrays of Python
objects are refused: only pickle can read them, and pickle can run any code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from data.findings import Severity
from data.readers.files import closed_on_failure
from data.readers.flat import FlatReader
from data.readers.flat_source import FlatSource
from data.readers.hdf5 import text_of
from data.readers.numpy_files import NPY_SIGNATURE, NumpyArray, NumpyFiles, is_npz

Role = Literal["observations", "actions", "rewards", "next_observations", "terminals", "timeouts", "dones"]

NAMES: dict[Role, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "states", "state"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "next_states", "next_state"),
    "terminals": ("terminals", "terminal", "terminated", "terminations"),
    "timeouts": ("timeouts", "timeout", "truncated", "truncations"),
    "dones": ("dones", "done"),
}
"""Usual names of each role."""


class Arrays(FlatReader):
    """Reads `.npz` files and folders of `.npy` files.

    keys: names of arrays by role, where they are not the usual ones or several are.
    ends: what `dones` mean if there are neither `terminals` nor `timeouts`.
    """

    kind: Literal["arrays"] = "arrays"
    keys: dict[Role, str] = Field(default_factory=dict)
    ends: Literal["truncated", "terminated"] = "truncated"

    def open(self, path: Path) -> ArraysSource:
        return ArraysSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.npy"))
        with path.open("rb") as stream:
            if stream.read(len(NPY_SIGNATURE)) == NPY_SIGNATURE:
                return True  # one array: opening says what else is needed
        if not is_npz(path):
            return False
        with NumpyFiles(path) as files:
            return bool(files.arrays)


class ArraysSource(FlatSource):
    """Opened arrays."""

    format = "arrays"

    def __init__(self, settings: Arrays, path: Path) -> None:
        super().__init__(settings, path)
        self._dones_are_terminals = settings.ends == "terminated"
        self._files = NumpyFiles(path)
        with closed_on_failure(self._files):
            self._open(settings)

    def close(self) -> None:
        self._files.close()

    # ------------------------------------------------------------ structure

    def _open(self, settings: Arrays) -> None:
        found = self._files.arrays
        keys = self._find_keys(found, settings.keys)
        for key in keys.values():
            if found[key].dtype.hasobject:
                found[key][:0]  # raises, saying why
        self._note("keys", "; ".join(f"{role}: '{key}'" for role, key in keys.items()) + ".")
        self._decide_ends(keys, settings)
        self._understand({role: found[key] for role, key in keys.items()}, keys)
        others = [key for key in found if key not in keys.values()]
        if others:
            self._note("other-keys", f"arrays not used: {', '.join(others)}.", count=len(others))
        scalars = [key for key in others if found[key].shape == () and not found[key].dtype.hasobject]
        self.metadata = {key: text_of(found[key].scalar()) for key in scalars}

    def _find_keys(self, found: Mapping[str, NumpyArray], given: Mapping[Role, str]) -> dict[str, str]:
        """The name of each role's array: the given one, or the only one with a usual name."""
        present = f"arrays present: {', '.join(found) or 'none'}"
        keys: dict[str, str] = {}
        for role, usual in NAMES.items():
            if role in given and given[role] not in found:
                raise self._refuse("missing-key", f"keys: there is no '{given[role]}'; {present}.")
            named = [given[role]] if role in given else [key for key in usual if key in found]
            if len(named) > 1:
                message = f"which of {', '.join(named)} is meant is not clear: say keys: {{{role}: {named[0]}}}."
                raise self._refuse("several-keys", message)
            if named:
                keys[role] = named[0]
            elif role in ("observations", "actions"):
                message = f"'{role}' is missing; {present}. If one of them is meant, say keys: {{{role}: ...}}."
                raise self._refuse("missing-key", message)
        return keys

    def _decide_ends(self, keys: dict[str, str], settings: Arrays) -> None:
        """Say what marks ends; takes `dones` out of `keys` if both others are there."""
        if "dones" in keys and "terminals" in keys and "timeouts" in keys:
            del keys["dones"]
        if "dones" in keys:
            one = next((role for role in ("terminals", "timeouts") if role in keys), None)
            if one:
                other = "truncated" if one == "terminals" else "terminated"
                message = f"'{keys['dones']}' without '{keys[one]}' are taken as {other}."
            elif settings.ends == "truncated":
                message = (
                    f"that an episode ended is marked ('{keys['dones']}'), not how: taken as truncated. If the task "
                    "ended there, say ends: terminated."
                )
            else:
                message = (
                    f"that an episode ended is marked ('{keys['dones']}'), not how: taken as terminated, as asked."
                )
            self._note("ends-taken", message)
        elif "terminals" not in keys:
            message = (
                "no array says that the task ended: no episode is taken as terminated. If one does, name it: keys."
            )
            self._note("no-terminals", message, Severity.WARNING)

    # ------------------------------------------------------------ rows

    def _ends(self, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        terminals, timeouts, dones = (
            self._flags(role, rows) if role in self._arrays else None for role in ("terminals", "timeouts", "dones")
        )
        if dones is not None:
            if timeouts is not None or (terminals is None and self._dones_are_terminals):
                terminals = dones if timeouts is None else dones & ~timeouts
            else:
                timeouts = dones if terminals is None else dones & ~terminals
        if terminals is None:
            terminals = np.zeros(rows.stop - rows.start, bool)
        return terminals, timeouts
