"""Episodes as `.npz` files, one a file, as RLDS exports, Dreamer and their relatives keep them.

    observation   [T + 1, ...]   also `observations`, `obs`, `image`, or several: `observation/position`, ...
    action        [T + 1, ...]   also `actions`
    reward        [T + 1]        also `rewards`; may be missing
    is_first, is_last            the first and the last row
    is_terminal                  the task ended there; also `terminal`, `terminated`; or `discount` 0
                                 (`done` says only that the episode ended: see the setting `ends`)

Files are read in the order of their names, numbers in them by value. T + 1 rows hold T steps, and two customs differ in
which: in RLDS a row holds the action taken at its observation, and the last row has none; in Dreamer (and dm_env) a row
holds the action and reward that led to its observation, and the first row has none. Taking one for the other shifts all
actions by a step, so the setting `layout` says it, or else the row that is empty (zeros or NaN) in every file; where
that does not tell, the files are refused. Where observations have one row more than actions there is no question.
(Ramos et al. 2021, "RLDS", github.com/google-research/rlds; Hafner et al. 2021, "Mastering Atari with Discrete World
Models", github.com/danijar/dreamerv2.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from data.errors import DatasetError
from data.readers.files import check_readable, natural
from data.readers.numpy_files import NumpyArray, NumpyFiles, is_npz
from data.readers.observations import PLAIN
from data.readers.reader import Space
from data.readers.recorded import Episode, MarkedReader, RecordedSource

OBSERVATION = ("observation", "observations", "obs")
IMAGE = "image"
ACTION, REWARD = ("action", "actions"), ("reward", "rewards")
FIRST, LAST, DISCOUNT = "is_first", "is_last", "discount"
TERMINAL, DONE = ("is_terminal", "terminal", "terminated"), ("done", "dones")
KNOWN = (*ACTION, *REWARD, FIRST, LAST, DISCOUNT, *TERMINAL, *DONE)

PROBES = 64
"""So many files show which row is empty; the others are held to it."""

Layout: TypeAlias = Literal["recognise", "rlds", "dreamer", "steps"]

LAYOUTS = {
    "rlds": "a row holds the action taken at its observation; the last row is no step",
    "dreamer": "a row holds the action that led to its observation; the first row is no step",
    "steps": "every row is a step; the observation after the last one is not known",
}


class EpisodesNpz(MarkedReader):
    """Reads folders of `.npz` files with one episode each, or one such file.

    layout: which row is no step: `rlds` the last, `dreamer` the first, `steps` none; or `recognise` it.
    """

    kind: Literal["episodes_npz"] = "episodes_npz"
    layout: Layout = "recognise"

    def open(self, path: Path) -> EpisodesNpzSource:
        return EpisodesNpzSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.npz"))
        if not is_npz(path):
            return False
        with NumpyFiles(path) as file:
            return FIRST in file.arrays or LAST in file.arrays


class EpisodesNpzSource(RecordedSource):
    """An opened folder of episodes."""

    format = "episodes_npz"
    n_steps = None

    def __init__(self, settings: EpisodesNpz, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        check_readable(path)
        self._files = sorted(path.glob("*.npz"), key=lambda file: natural(file.name)) if path.is_dir() else [path]
        if not self._files:
            raise self._refuse("no-steps", "no steps: the folder has no .npz files.")
        self.metadata = {"n_files": len(self._files)}
        with NumpyFiles(self._files[0]) as first:
            self._find_keys(first.arrays)
            action = self._array(self._files[0], first, self._action)
        if action.dtype.kind not in "fiub":
            raise self._refuse("actions-dtype", f"'{self._action}' is {action.dtype}: expected numbers.")
        self._layout = self._recognise_layout() if settings.layout == "recognise" else settings.layout
        self._understand_actions(settings, action.shape[1:], action.dtype)

    def close(self) -> None:
        """Files are open only while they are read."""

    # ------------------------------------------------------------ structure

    def _find_keys(self, arrays: Mapping[str, NumpyArray]) -> None:
        """Which array is what, by the first file."""
        action = self._one_of(arrays, ACTION)
        if action is None:
            raise self._missing(ACTION[0], arrays)
        self._action, self._reward = action, self._one_of(arrays, REWARD)
        terminal, done = self._one_of(arrays, TERMINAL), self._one_of(arrays, DONE)
        self._end = terminal or (DISCOUNT if DISCOUNT in arrays else done)
        self._bounds = [key for key in (FIRST, LAST) if key in arrays]
        if self._end is None or self._end == done:
            self.findings.append(self._settings.said(done and f"'{done}'"))
        spaces = {
            key: Space(shape=array.shape[1:], dtype=array.dtype.name)
            for key, array in arrays.items()
            if key not in KNOWN and array.shape
        }
        chosen = self._settings.observation_keys
        if chosen is None:
            named = {key: space for key, space in spaces.items() if re.split(r"[./]", key)[0] in OBSERVATION}
            spaces = named or {key: space for key, space in spaces.items() if key == IMAGE}
            if not spaces:
                raise self._missing(OBSERVATION[0], arrays, " Say which are observations with observation_keys.")
        if chosen is None and len(spaces) == 1:
            ((key, space),) = spaces.items()
            self._understand_observations(space, None)
            self._sources = {PLAIN: key}
        else:
            self._understand_observations(spaces, chosen)
            self._sources = {key: key for key in self._observations.keys}
        read = {action, self._reward, self._end, *self._bounds, *self._sources.values()}
        others = [key for key in arrays if key not in read]
        if others:
            self._note("other-keys", f"arrays not used: {', '.join(others)}.", count=len(others))

    def _one_of(self, arrays: Mapping[str, NumpyArray], keys: tuple[str, ...]) -> str | None:
        found = [key for key in keys if key in arrays]
        if len(found) > 1:
            raise self._refuse("several-keys", f"{' and '.join(map(repr, found))} are both there: keep one of them.")
        return found[0] if found else None

    def _recognise_layout(self) -> Layout:
        """The layout that the first files have; `recognise` where it is not needed."""
        empty: list[tuple[bool, bool]] = []
        for path in self._files[:PROBES]:
            with NumpyFiles(path) as file:
                action = self._array(path, file, self._action)
                if self._array(path, file, next(iter(self._sources.values()))).shape[0] == action.shape[0]:
                    empty.append((self._is_empty(path, file, 0), self._is_empty(path, file, -1)))
        if not empty:
            return "recognise"
        first, last = zip(*empty, strict=True)
        layout: Layout | None = None
        if all(last) and not all(first):
            layout = "rlds"
        elif all(first) and not all(last):
            layout = "dreamer"
        elif not any(first) and not any(last) and not self._bounds:
            layout = "steps"
        if layout is None:
            which = "both are" if all(first) else "neither is"
            choices = "; ".join(f"layout: {name} ({text})" for name, text in LAYOUTS.items())
            raise self._refuse(
                "layout",
                "there are as many actions as observations, and which row is no step, the first or the last, cannot be "
                f"seen: {which} empty in every file. Say it: {choices}.",
            )
        self._note(
            "layout-taken", f"{LAYOUTS[layout]} (seen in {len(empty):,} files). If that is wrong, say so with layout."
        )
        return layout

    def _array(self, path: Path, file: NumpyFiles, key: str) -> NumpyArray:
        if key not in file.arrays:
            raise DatasetError(f"{path.name}: '{key}' is missing; {_present(file.arrays)}.")
        array = file.arrays[key]
        if not array.shape:
            raise DatasetError(f"{array.where} is a single value: expected one row a time point.")
        return array

    def _missing(self, key: str, arrays: Mapping[str, NumpyArray], advice: str = "") -> DatasetError:
        return self._refuse("missing-key", f"no '{key}' in {self._files[0].name}; {_present(arrays)}.{advice}")

    # ------------------------------------------------------------ episodes

    def _actions(self) -> Iterator[np.ndarray]:
        for path in self._files:
            with NumpyFiles(path) as file:
                yield self._array(path, file, self._action)[:]

    def _episodes(self) -> Iterator[Episode]:
        for path in self._files:
            with NumpyFiles(path) as file:
                yield self._episode(path, file)

    def _episode(self, path: Path, file: NumpyFiles) -> Episode:
        def read(key: str) -> np.ndarray:
            values = self._array(path, file, key)[:]
            return values.reshape(-1) if values.shape[1:] == (1,) else values

        observations = {name: self._array(path, file, key)[:] for name, key in self._sources.items()}
        actions = self._array(path, file, self._action)[:]
        steps = self._steps(path, file, len(next(iter(observations.values()))), len(actions))
        for key, inside in ((FIRST, slice(1, None)), (LAST, slice(0, -1))):
            if key in self._bounds and np.any(read(key)[inside]):
                raise DatasetError(f"{path.name}: '{key}' inside the file: several episodes in one. Write one a file.")
        ended = np.arange(steps.n) == steps.n - 1
        if LAST in self._bounds:
            ended = steps.flags(read(LAST))
        if self._end in (None, *DONE):
            marks = None if self._end is None else steps.flags(read(self._end))
            terminations, truncations = self._settings.flags(marks, steps.n)
        else:
            values = read(self._end)
            terminations = steps.flags(values == 0 if self._end == DISCOUNT else values)
            truncations = ended.astype(bool) & (terminations == 0)
        return Episode(
            name=path.name,
            observations=observations,
            actions=steps.values(actions),
            rewards=steps.values(read(self._reward)) if self._reward else None,
            terminations=terminations,
            truncations=truncations,
            marks=self._end,
        )

    def _steps(self, path: Path, file: NumpyFiles, n_observations: int, n_actions: int) -> _Steps:
        """Which rows are steps. Raises DatasetError where they are not as in the files that showed the layout."""
        if n_observations == n_actions + 1:
            return _Steps(n_actions, from_second=False)
        if self._layout == "recognise":
            raise DatasetError(
                f"{path.name}: {n_observations:,} observations but {n_actions:,} actions; expected one action "
                "fewer, as in the files before. If they belong together, say which row is no step with layout."
            )
        if self._layout == "steps":
            return _Steps(n_actions, from_second=False)
        from_second = self._layout == "dreamer"
        if self._settings.layout == "recognise" and not self._is_empty(path, file, 0 if from_second else -1):
            raise DatasetError(
                f"{path.name}: its {'first' if from_second else 'last'} row is not empty, as it is in the files "
                "before. Say which row is no step with layout."
            )
        return _Steps(max(n_actions - 1, 0), from_second)

    def _is_empty(self, path: Path, file: NumpyFiles, row: Literal[0, -1]) -> bool:
        """Whether the action and the reward of the first or last row are zero or NaN."""
        for key in (self._action, self._reward):
            array = self._array(path, file, key) if key else None
            if array is not None and array.shape[0]:
                values = array[slice(0, 1) if row == 0 else slice(array.shape[0] - 1, None)]
                if not ((values == 0) | (values != values)).all():
                    return False
        return True


@dataclass(frozen=True)
class _Steps:
    """Which rows of an episode are its n steps: of n + 1 rows the first n, or those from the second on."""

    n: int
    from_second: bool

    def values(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) != self.n + 1:
            return rows
        return rows[1:] if self.from_second else rows[:-1]

    def flags(self, rows: np.ndarray) -> np.ndarray:
        """Flags of steps; one in the row of the last observation is one of the last step."""
        flags = np.array(self.values(rows))
        if len(rows) == self.n + 1 and self.n and not self.from_second:
            flags[-1] = max(flags[-1], rows[-1])
        return flags


def _present(arrays: Mapping[str, NumpyArray]) -> str:
    return f"arrays present: {', '.join(arrays) or 'none'}"
