"""robomimic: HDF5 with one group a demonstration.

    data               attributes `env_args` (JSON: environment and its settings), `total`
    data/demo_0        `actions` [T, d], `dones` [T], `rewards` [T], `obs/<key>` [T, ...], `next_obs/<key>` [T, ...]
    mask/<filter key>  names of the demonstrations of a part (`train`, `valid`)

Demonstrations are read in the order of their numbers. The observation after the last step is the last row of
`next_obs`; it is not known without `next_obs`, where that row repeats the step's own observation though the
demonstration was moving, and where the row before is not the following row of `obs`. `dones` mark the success or the
end of a demonstration and do not say which (`done_mode` of dataset_states_to_obs.py): see the setting `ends`.
Files of raw demonstrations hold simulator states and no `obs`; they are refused.
(Mandlekar et al. 2021, "What Matters in Learning from Offline Human Demonstrations"; robomimic.github.io.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import JsonValue

from data.findings import Severity
from data.readers.continuity import compare
from data.readers.files import closed_on_failure
from data.readers.hdf5 import attributes_of, check_array, is_hdf5, names, open_hdf5, reading, value_of
from data.readers.reader import Space
from data.readers.recorded import PLACES, Episode, MarkedReader, RecordedSource


class Robomimic(MarkedReader):
    """Reads robomimic HDF5.

    filter_key: the part to read, by its name under `mask`; all demonstrations by default.
    """

    kind: Literal["robomimic"] = "robomimic"
    filter_key: str | None = None

    def open(self, path: Path) -> RobomimicSource:
        return RobomimicSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not is_hdf5(path):
            return False
        with open_hdf5(path) as file, reading(path, "data"):
            data = file.get("data")
            return isinstance(data, h5py.Group) and any(_number(name) is not None for name in names(data))


class RobomimicSource(RecordedSource):
    """An opened robomimic file."""

    format = "robomimic"

    def __init__(self, settings: Robomimic, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        self._file = open_hdf5(path)
        with closed_on_failure(self._file):
            self._open()

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------ structure

    def _open(self) -> None:
        with reading(self._path, "data"):
            data = self._file.get("data")
            present = names(data) if isinstance(data, h5py.Group) else []
        demonstrations = sorted((name for name in present if _number(name) is not None), key=lambda n: _number(n) or 0)
        if not demonstrations:
            held = ", ".join(present[:8]) or "nothing"
            raise self._refuse("missing-key", f"no 'data/demo_0', 'data/demo_1', ...; 'data' holds {held}.")
        others = [name for name in present if name not in demonstrations]
        if others:
            message = f"'data' holds other things than 'demo_N', which are not read: {', '.join(others)}."
            self._note("other-keys", message, Severity.WARNING, len(others))
        masks = self._masks()
        self._names = self._filtered(demonstrations, masks)
        first = self._names[0]
        actions = self._array(first, "actions")
        self._understand_observations(self._spaces(first), self._settings.observation_keys)
        self._understand_actions(self._settings, actions.shape[1:], actions.dtype)
        with reading(self._path, "data"):
            self._has = {key: key in self._file["data"][first] for key in ("dones", "rewards")}
            attributes = attributes_of(self._file["data"])
            counts = {name: self._file["data"][name].attrs.get("num_samples") for name in demonstrations}
        self._count_steps(counts, attributes.get("total"))
        self.findings.append(self._settings.said("'dones'" if self._has["dones"] else None))
        parts: JsonValue = {key: len(members) for key, members in masks.items()}
        self.metadata = {key: _parsed(value) for key, value in attributes.items()} | {"filter_keys": parts}

    def _count_steps(self, counts: dict[str, int | None], total: JsonValue) -> None:
        """Set n_steps. counts: steps of each demonstration in the file, as it says. total: as it says for all."""
        known = [int(count) for count in counts.values() if count is not None]
        if len(known) < len(counts):
            self.n_steps = None
            return
        self.n_steps = sum(int(counts[name] or 0) for name in self._names)
        if total is not None and total != sum(known):
            message = f"'data' says {total} steps in all, and its demonstrations have {sum(known):,}: some may be lost."
            self._note("total-differs", message, Severity.WARNING)

    def _masks(self) -> dict[str, list[str]]:
        with reading(self._path, "mask"):
            group = self._file.get("mask")
            if not isinstance(group, h5py.Group):
                return {}
            return {key: np.atleast_1d(np.array(value_of(group[key]), str)).tolist() for key in names(group)}

    def _filtered(self, demonstrations: list[str], masks: dict[str, list[str]]) -> list[str]:
        key = self._settings.filter_key
        if key is None:
            if masks:
                parts = ", ".join(f"{name} ({len(members):,})" for name, members in masks.items())
                self._note("filter-keys", f"all {len(demonstrations):,} demonstrations are read; parts: {parts}.")
            return demonstrations
        if key not in masks:
            raise self._refuse("filter-key", f"no filter key '{key}'; present: {', '.join(masks) or 'none'}.")
        missing = [name for name in masks[key] if name not in demonstrations]
        chosen = [name for name in demonstrations if name in masks[key]]
        if missing or not chosen:
            found = f"names '{missing[0]}', which is not in the file" if missing else "is empty"
            raise self._refuse("filter-key", f"'mask/{key}' {found}: choose another part or repair it.")
        self._note(
            "filter-key",
            f"{len(chosen):,} of {len(demonstrations):,} demonstrations are read, those of filter key '{key}': "
            f"{', '.join(chosen[:PLACES])}{', ...' if len(chosen) > PLACES else ''} are episodes 0, 1, ...",
            count=len(chosen),
        )
        return chosen

    def _spaces(self, name: str) -> dict[str, Space]:
        with reading(self._path, f"data/{name}"):
            group = self._file["data"][name]
            keys = names(group["obs"]) if "obs" in group else []
            present = ", ".join(names(group))
        if not keys:
            raise self._refuse(
                "missing-key",
                f"'data/{name}' has no observations ('obs'); it holds {present}. Raw demonstrations have simulator "
                "states alone: extract observations with robomimic's dataset_states_to_obs.py.",
            )
        arrays = {key: self._array(name, f"obs/{key}") for key in keys}
        return {key: Space(shape=array.shape[1:], dtype=array.dtype.name) for key, array in arrays.items()}

    def _array(self, name: str, key: str) -> h5py.Dataset:
        full = f"data/{name}/{key}"
        with reading(self._path, full):
            array = self._file.get(full)
        if not isinstance(array, h5py.Dataset) or not array.shape:
            raise self._refuse("missing-key", f"'{full}' is missing, or no array with one row a step.")
        check_array(self._path, full, array)
        return array

    # ------------------------------------------------------------ episodes

    def _values(self, name: str, key: str, rows: slice = slice(None)) -> np.ndarray:
        array = self._array(name, key)
        with reading(self._path, f"data/{name}/{key}"):
            values: np.ndarray = array[rows]
        return values

    def _actions(self) -> Iterator[np.ndarray]:
        return (self._values(name, "actions") for name in self._names)

    def _episodes(self) -> Iterator[Episode]:
        self._n_not_own = 0
        for name in self._names:
            actions = self._values(name, "actions")
            observations = {key: self._values(name, f"obs/{key}") for key in self._observations.keys}
            final = self._final(name, observations) if len(actions) else None
            if final is not None:
                observations = {key: np.concatenate([rows, final[key]]) for key, rows in observations.items()}
            marks = self._values(name, "dones") if self._has["dones"] else None
            terminations, truncations = self._settings.flags(marks, len(actions))
            yield Episode(
                name=name,
                observations=observations,
                actions=actions,
                rewards=self._values(name, "rewards") if self._has["rewards"] else None,
                terminations=terminations,
                truncations=truncations,
                marks="dones",
            )
        if self._n_not_own:
            self._note(
                "next-observations-disagree",
                f"'next_obs' of {self._n_not_own:,} demonstrations repeats the last observation, or is not the "
                "following row in the step before: its last row is not believed.",
                Severity.WARNING,
                self._n_not_own,
            )

    def _final(self, name: str, observations: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """[1, ...] the observation after the last step for each key, None if it is not known."""
        with reading(self._path, f"data/{name}/next_obs"):
            if "next_obs" not in self._file["data"][name]:
                return None
        recorded = {}
        jumps, moving, repeated = False, False, True
        for key, rows in observations.items():
            array = self._array(name, f"next_obs/{key}")
            if array.shape != rows.shape:
                message = f"'data/{name}/next_obs/{key}' has shape {array.shape} and 'obs/{key}' {rows.shape}"
                raise self._refuse("shape", f"{message}: they must be the same.")
            if array.dtype.kind not in "fiub" or rows.dtype.kind not in "fiub":
                message = f"'data/{name}/obs/{key}' is {rows.dtype} and 'next_obs/{key}' {array.dtype}"
                raise self._refuse("observations-dtype", f"{message}: expected numbers.")
            last = self._values(name, f"next_obs/{key}", slice(max(len(rows) - 2, 0), None))
            own = rows[-len(last) :]
            jumps |= bool(compare(own, last, own[1:])[0].any())
            moving |= bool((last[:-1] != own[:-1]).any())
            repeated &= bool((last[-1] == own[-1]).all())
            recorded[key] = last[-1:]
        if jumps or (moving and repeated):
            self._n_not_own += 1
            return None
        return recorded


def _number(name: str) -> int | None:
    """N of `demo_N`."""
    match = re.fullmatch(r"demo_(\d+)", name)
    return int(match[1]) if match else None


def _parsed(value: JsonValue) -> JsonValue:
    """JSON inside text (`env_args`) as what it says."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        parsed: JsonValue = json.loads(value, parse_constant=str)
    except json.JSONDecodeError:
        return value
    return parsed
