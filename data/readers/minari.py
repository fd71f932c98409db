"""Minari: a folder with `metadata.json` and episodes in HDF5, Arrow or Parquet, as `minari` keeps them on disk.

The folder is that of the dataset (`hopper/replay-v0`), its `data` folder, or one above it that holds no other dataset.
`main_data.hdf5` can be read alone; what it does not say itself (older versions of Minari wrote everything into it) is
then not known. Storage is described in `data/readers/minari_storage.py`.

Episodes are read in the order of their numbers (HDF5 lists `episode_10` before `episode_2`). Their observations are one
row longer than their actions; an episode with as many has no final observation. Dict and tuple observations, nested
ones with dotted names (`robot.position`, `0`), are chosen and joined by `observation_keys`. What actions are is said by
the action space: counts of discrete ones, bounds of continuous ones; ids that start at another number than 0 are
counted from 0. Rewards that are all NaN mean that there are none: Minari cannot leave them out.
(Farama Foundation, minari.farama.org, "Dataset Standards".)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from data.findings import Severity
from data.readers.actions import common_bounds
from data.readers.files import check_readable, closed_on_failure, read_json
from data.readers.hdf5 import is_hdf5, names, open_hdf5, reading
from data.readers.minari_spaces import (
    Box,
    Dict,
    Discrete,
    MinariSpace,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
    choices,
    leaves,
    parse_space,
)
from data.readers.minari_storage import MAIN, ArrowStorage, HDF5Storage, MinariStorage
from data.readers.observations import PLAIN, KeyedReader
from data.readers.recorded import PLACES, Episode, RecordedSource

METADATA = "metadata.json"
SPACES = ("observation_space", "action_space")

LONG_TEXT = 10_000
"""Spaces of images list every pixel's bounds: a longer text is not kept in manifests."""


class Minari(KeyedReader):
    """Reads Minari datasets."""

    kind: Literal["minari"] = "minari"

    def open(self, path: Path) -> MinariSource:
        return MinariSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return bool(_data_folders(path))
        if not is_hdf5(path):
            return False
        with open_hdf5(path) as file, reading(path, "/"):
            first = next((file[key] for key in names(file) if re.fullmatch(r"episode_\d+", key)), None)
            return isinstance(first, h5py.Group) and "observations" in first


class MinariSource(RecordedSource):
    """An opened Minari dataset."""

    format = "minari"

    def __init__(self, settings: Minari, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        check_readable(path)
        folder = self._folder() if path.is_dir() else None
        if folder is None:
            self._storage: MinariStorage = HDF5Storage(path)
        elif (folder / MAIN).exists():
            self._storage = HDF5Storage(folder / MAIN)
        else:
            self._storage = ArrowStorage(folder)
        with closed_on_failure(self._storage):
            self._open(folder)

    def close(self) -> None:
        self._storage.close()

    # ------------------------------------------------------------ structure

    def _folder(self) -> Path:
        folders = _data_folders(self._path)
        if not folders:
            raise self._refuse(
                "no-dataset", f"no Minari dataset here: expected '{MAIN}', or '{METADATA}' beside folders '0', '1', ..."
            )
        if len(folders) > 1:
            names = ", ".join(str(folder.parent.relative_to(self._path)) for folder in folders[:PLACES])
            raise self._refuse(
                "several-datasets", f"{len(folders):,} Minari datasets here ({names}): give one of them."
            )
        return folders[0]

    def _open(self, folder: Path | None) -> None:
        metadata = self._storage.attributes()
        if folder is not None and (folder / METADATA).exists():
            metadata |= read_json(folder / METADATA)
        spaces = {
            key: parse_space(str(metadata[key]), f"{self._path.name}: '{key}'") if metadata.get(key) else None
            for key in SPACES
        }
        if None in spaces.values():
            self._note(
                "no-metadata",
                "no space is declared in the metadata: shapes and dtypes are those of the first episode, and what "
                "actions may be is not known.",
                Severity.WARNING,
            )
        for key in SPACES:
            if len(str(metadata.get(key))) > LONG_TEXT:
                del metadata[key]
                self._note(
                    "metadata-left-out", f"'{key}' has more than {LONG_TEXT:,} characters: not kept as metadata."
                )
        self.metadata = metadata
        self._check_counts()
        observation_space, action_space = spaces.values()
        found = self._storage.spaces({} if observation_space is None else leaves(observation_space))
        plain = found[PLAIN] if list(found) == [PLAIN] else found
        self._understand_observations(plain, self._settings.observation_keys)
        self._understand_space(action_space)
        self._has_rewards = self._find_rewards()

    def _check_counts(self) -> None:
        total, found = self.metadata.get("total_episodes"), len(self._storage.episodes)
        steps = self.metadata.get("total_steps")
        self.n_steps = steps if isinstance(steps, int) else None
        present = set(self._storage.episodes)
        n_missing = self._storage.episodes[-1] + 1 - found
        gaps = islice((n for n in count() if n not in present), min(n_missing, PLACES))
        missing = f"{', '.join(map(str, gaps))}{', ...' if n_missing > PLACES else ''}"
        if isinstance(total, int) and found < total:
            lacking = f"; missing: {missing}" if missing else ""
            raise self._refuse(
                "missing-episodes",
                f"'{METADATA}' says {total:,} episodes and {found:,} are there{lacking}. Download or make it again.",
            )
        if isinstance(total, int) and found > total:
            message = f"'{METADATA}' says {total:,} episodes and {found:,} are there: all are read."
            self._note("more-episodes", message, Severity.WARNING)
        if n_missing:
            message = f"there is no episode {missing}: episodes are counted without them."
            self._note("gaps-in-numbers", message, Severity.WARNING, n_missing)

    def _understand_space(self, space: MinariSpace | None) -> None:
        """What actions are, by their space. `_start` is subtracted from discrete ones."""
        self._start = np.zeros((), np.int64)
        self._action_shape: tuple[int, ...] | None = None
        declared, bounds = None, None
        match space:
            case Box():
                self._action_shape = space.shape
                low, high = space.bounds()
                bounds = common_bounds(low, high, self.findings) if low.size else None
            case Discrete() | MultiDiscrete() | MultiBinary():
                counts, self._start = choices(space)
                self._action_shape = counts.shape
                declared = tuple(int(count) for count in counts.reshape(-1))
            case Dict() | Tuple() | Text():
                expected = "expected Box, Discrete, MultiDiscrete or MultiBinary"
                raise self._refuse("action-space", f"actions are a {space.type} space: {expected}.")
        first = self._raw_actions(self._storage.episodes[0])
        self._whole = isinstance(space, Box) and first.dtype.kind in "iub" and self._settings.n_actions is None
        dtype = np.dtype(np.float32) if self._whole else first.dtype
        self._understand_actions(self._settings, first.shape[1:], dtype, declared, bounds)
        if self._whole:
            self._note("box-of-integers", f"actions are a Box of {first.dtype}: read as continuous, as declared.")
        if self._start.any():
            self._note("action-start", f"ids of actions start at {self._start.tolist()}: they are counted from 0.")

    def _find_rewards(self) -> bool:
        """Whether any reward is a number. Reads all of them only if none is."""
        nothing = True
        for episode in self._storage.episodes:
            rewards = self._storage.column(episode, "rewards", ())
            nothing &= rewards is None
            if rewards is not None and not np.isnan(rewards.astype(np.float64)).all():
                return True
        if not nothing:
            self._note("unlabelled", "all rewards are NaN: there are no `source` labels.")
        return False

    # ------------------------------------------------------------ episodes

    def _episodes(self) -> Iterator[Episode]:
        spaces = dict(zip(self._observations.keys, self._observations.spaces, strict=True))
        for episode in self._storage.episodes:
            actions = self._raw_actions(episode)
            if self._whole:
                actions = actions.astype(np.float32)
            yield Episode(
                name=self._storage.name(episode),
                observations={key: self._storage.observations(episode, key, space) for key, space in spaces.items()},
                actions=actions - self._start if self._start.any() else actions,
                rewards=self._needed(episode, "rewards") if self._has_rewards else None,
                terminations=self._needed(episode, "terminations"),
                truncations=self._needed(episode, "truncations"),
            )

    def _raw_actions(self, episode: int) -> np.ndarray:
        return self._needed(episode, "actions", self._action_shape)

    def _actions(self) -> Iterator[np.ndarray]:
        return (self._raw_actions(episode) for episode in self._storage.episodes)

    def _needed(self, episode: int, key: str, shape: tuple[int, ...] | None = ()) -> np.ndarray:
        column = self._storage.column(episode, key, shape)
        if column is None:
            raise self._refuse("missing-key", f"'{self._storage.name(episode)}/{key}' is missing.")
        return column


def _data_folders(path: Path) -> list[Path]:
    """The data folders at or below `path`: itself, `data`, `<name>/data` or `<namespace>/<name>/data`."""
    for pattern in (".", "data", "*/data", "*/*/data"):
        folders = [path] if pattern == "." else sorted(path.glob(pattern))
        found = [folder for folder in folders if _is_data_folder(folder)]
        if found:
            return found
    return []


def _is_data_folder(folder: Path) -> bool:
    return (folder / MAIN).is_file() or ((folder / METADATA).is_file() and (folder / "0").is_dir())
