"""d3rlpy: HDF5 written by `ReplayBuffer.dump`, version 2.1, one group of arrays an episode.

    columns                 names of what follows: `observations`, `actions`, `rewards`, `terminated`
    num_episodes, version   numbers of episodes and of the format
    observations_0          [T, ...]; for tuple observations `observations_0_0`, `observations_0_1`, ...
    actions_0, rewards_0    [T, ...], [T, 1]
    terminated_0            whether the task ended; if not, the episode was truncated

The observation after an episode's last step is not in the file. Parts of tuple observations are named by their place
(`0`, `1`) and chosen by `observation_keys`. Columns that a user's own kind of episode adds are listed and not read.
Dumps of version 1 are flat arrays: see `data/readers/d4rl.py`.
(Seno & Imai 2022, "d3rlpy: An Offline Deep Reinforcement Learning Library"; `d3rlpy.dataset.io`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import JsonValue

from data.findings import Severity
from data.readers.files import closed_on_failure
from data.readers.hdf5 import check_array, is_hdf5, open_hdf5, reading, value_of
from data.readers.observations import KeyedReader
from data.readers.reader import Space
from data.readers.recorded import Episode, RecordedSource

COLUMNS, N_EPISODES, VERSION = "columns", "num_episodes", "version"
READ = ("observations", "actions", "rewards", "terminated")


class D3rlpy(KeyedReader):
    """Reads dumps of d3rlpy's replay buffers."""

    kind: Literal["d3rlpy"] = "d3rlpy"

    def open(self, path: Path) -> D3rlpySource:
        return D3rlpySource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not is_hdf5(path):
            return False
        with open_hdf5(path) as file, reading(path, "/"):
            return COLUMNS in file and VERSION in file


class D3rlpySource(RecordedSource):
    """An opened dump."""

    format = "d3rlpy"

    def __init__(self, settings: D3rlpy, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        self._file = open_hdf5(path)
        with closed_on_failure(self._file):
            self._open()

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------ structure

    def _open(self) -> None:
        said = {key: self._said(key) for key in (VERSION, COLUMNS, N_EPISODES)}
        columns, n_episodes = said[COLUMNS], said[N_EPISODES]
        if not isinstance(columns, list) or not isinstance(n_episodes, int):
            raise self._refuse("structure", f"'{COLUMNS}' is {columns} and '{N_EPISODES}' {n_episodes}: not a dump.")
        for key in READ:
            if key not in columns and key != "rewards":
                present = ", ".join(map(str, columns))
                raise self._refuse("missing-key", f"no column '{key}'; columns present: {present}.")
        if n_episodes < 1:
            raise self._refuse("no-steps", "no steps: the dump has no episodes.")
        self._has_rewards, self._n_episodes = "rewards" in columns, n_episodes
        others = [str(key) for key in columns if key not in READ]
        if others:
            self._note("other-keys", f"columns not used: {', '.join(others)}.", count=len(others))
        with reading(self._path, "/"):
            more = f"actions_{n_episodes}" in self._file
        if more:
            self._note(
                "more-episodes",
                f"'{N_EPISODES}' says {n_episodes:,}, and there is an 'actions_{n_episodes}': it is not read.",
                Severity.WARNING,
            )
        lengths = [self._array(f"actions_{episode}").shape[0] for episode in range(n_episodes)]
        self.n_steps = sum(lengths)
        self.metadata = {VERSION: said[VERSION]}
        actions = self._array("actions_0")
        self._understand_observations(self._spaces(), self._settings.observation_keys)
        self._understand_actions(self._settings, actions.shape[1:], actions.dtype)

    def _said(self, key: str) -> JsonValue:
        with reading(self._path, key):
            found = self._file.get(key)
            value = value_of(found) if isinstance(found, h5py.Dataset) else None
            present = ", ".join(sorted(self._file)[:8]) or "nothing"
        if value is None:
            raise self._refuse("missing-key", f"'{key}' is missing; the file holds {present}.")
        return value

    def _spaces(self) -> Space | dict[str, Space]:
        """Observations of the first episode: one array, or the parts of a tuple."""

        def space(name: str) -> Space:
            array = self._array(name)
            return Space(shape=array.shape[1:], dtype=array.dtype.name)

        with reading(self._path, "/"):
            parts = list(takewhile(lambda part: f"observations_0_{part}" in self._file, count()))
        self._is_tuple = bool(parts)
        return {str(part): space(f"observations_0_{part}") for part in parts} or space("observations_0")

    def _array(self, name: str) -> h5py.Dataset:
        with reading(self._path, name):
            array = self._file.get(name)
        if not isinstance(array, h5py.Dataset) or not array.shape:
            raise self._refuse(
                "missing-key",
                f"'{name}' is missing, or no array with one row a step; '{N_EPISODES}' says {self._n_episodes:,}.",
            )
        check_array(self._path, name, array)
        return array

    # ------------------------------------------------------------ episodes

    def _values(self, name: str) -> np.ndarray:
        array = self._array(name)
        with reading(self._path, name):
            values: np.ndarray = array[()]
        return values

    def _actions(self) -> Iterator[np.ndarray]:
        return (self._values(f"actions_{episode}") for episode in range(self._n_episodes))

    def _episodes(self) -> Iterator[Episode]:
        for episode in range(self._n_episodes):
            actions = self._values(f"actions_{episode}")
            names = {key: f"observations_{episode}" + f"_{key}" * self._is_tuple for key in self._observations.keys}
            terminated = self._said(f"terminated_{episode}")
            if terminated not in (0, 1):
                raise self._refuse("flag", f"'terminated_{episode}' is {terminated}: flags are 0 or 1.")
            last = np.arange(len(actions)) == len(actions) - 1
            yield Episode(
                name=f"episode {episode}",
                observations={key: self._values(name) for key, name in names.items()},
                actions=actions,
                rewards=self._values(f"rewards_{episode}") if self._has_rewards else None,
                terminations=last & bool(terminated),
                truncations=last & (not terminated),
            )
