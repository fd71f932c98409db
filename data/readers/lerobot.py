"""LeRobot: a folder of Parquet files with one row a step, described by `meta/info.json`; versions 2.0, 2.1 and 3.0.

    meta/info.json                                  version, counts, `data_path`, the features and their shapes
    meta/episodes.jsonl                             v2: one line an episode: `episode_index`, `length`, `tasks`
    data/chunk-000/episode_000000.parquet           v2: one file an episode
    meta/episodes/chunk-000/file-000.parquet        v3: the same as rows, with `data/chunk_index`, `data/file_index`
    data/chunk-000/file-000.parquet                 v3: many episodes a file

Observations are the features `observation` and `observation.*`, actions `action`, rewards `next.reward`. Pictures, as
video files or as images in the rows, are not read: a dataset that has some is refused unless they are left out, by
the setting `videos` or by choosing other keys. The observation after an episode's last step is never recorded.
`next.done` and `next.success` mark that an episode ended, not how: see the setting `ends`. Datasets that assay wrote
say both, and what actions are, in `meta/assay.parquet` and `meta/assay.json`.
(Cadene et al. 2024, github.com/huggingface/lerobot, `LeRobotDataset`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
import pydantic
from pydantic import Field, JsonValue

from data.errors import DatasetError
from data.findings import Severity
from data.readers.arrow import column_values, open_parquet, reading_arrow
from data.readers.files import check_readable, parse_json, read_json
from data.readers.reader import Space
from data.readers.recorded import Episode, MarkedReader, RecordedSource

INFO, EPISODES = "meta/info.json", "meta/episodes"
ENDS, FINAL, BESIDE = "meta/assay.parquet", "final_observation", "meta/assay.json"
ACTION, REWARD, MARKS = "action", "next.reward", ("next.done", "next.success")
PLACE = ("episode_index", "frame_index")
KNOWN = (ACTION, REWARD, *MARKS, *PLACE, "timestamp", "index", "task_index")
PICTURES = ("video", "image")

ROWS = 1 << 13
"""So many rows are unpacked at a time."""


class LeRobot(MarkedReader):
    """Reads LeRobot datasets.

    videos: what to do with observations that are videos or images.
    """

    kind: Literal["lerobot"] = "lerobot"
    videos: Literal["refuse", "leave_out"] = "refuse"

    def open(self, path: Path) -> LeRobotSource:
        return LeRobotSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / INFO).is_file()


class Feature(pydantic.BaseModel):
    """One column. shape: of one row; a scalar has shape (1,)."""

    dtype: str
    shape: tuple[int, ...]


class Info(pydantic.BaseModel):
    """What is needed of `meta/info.json`."""

    codebase_version: str
    total_episodes: int
    total_frames: int
    chunks_size: int = Field(default=1000, ge=1)
    data_path: str
    features: dict[str, Feature]


class Entry(pydantic.BaseModel):
    """What `meta/episodes` says about one episode."""

    episode_index: int
    length: int
    tasks: list[str] = Field(default_factory=list)
    chunk_index: int = Field(default=0, alias="data/chunk_index")
    file_index: int = Field(default=0, alias="data/file_index")


class Beside(pydantic.BaseModel):
    """What assay writes beside: `n_actions` and `action_bounds` of `Trajectories`."""

    n_actions: tuple[int, ...] | None = None
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class _End:
    """One row of `ENDS`. final: [1, ...] the observation after the last step, None where it was not recorded."""

    episode: int
    terminated: bool
    truncated: bool
    final: np.ndarray | None


class LeRobotSource(RecordedSource):
    """An opened LeRobot dataset."""

    format = "lerobot"

    def __init__(self, settings: LeRobot, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        check_readable(path)
        raw = read_json(path / INFO, INFO)
        self._info = _validated(Info, raw, INFO)
        if not self._info.codebase_version.startswith(("v2.", "v3.")):
            raise self._refuse(
                "version",
                f"'{INFO}' says version {self._info.codebase_version}; versions 2.0, 2.1 and 3.0 can be read. Convert "
                "it with the scripts of lerobot.",
            )
        self._entries = self._read_entries()
        self.n_steps = self._info.total_frames
        tasks: JsonValue = dict(Counter(task for entry in self._entries for task in entry.tasks))
        beside = read_json(path / BESIDE, BESIDE) if (path / BESIDE).exists() else {}
        self._beside = _validated(Beside, beside, BESIDE)
        self.metadata = raw | beside | {"tasks": tasks}
        self._understand_features()

    def close(self) -> None:
        """Files are open only while they are read."""

    # ------------------------------------------------------------ structure

    def _read_entries(self) -> list[Entry]:
        """All episodes by their number."""
        if self._info.codebase_version.startswith("v2."):
            file = self._path / f"{EPISODES}.jsonl"
            check_readable(file, f"{EPISODES}.jsonl")
            lines = file.read_bytes().splitlines()
            names = [f"{EPISODES}.jsonl, line {n}" for n in range(1, len(lines) + 1)]
            rows = [parse_json(line, name) for line, name in zip(lines, names, strict=True)]
        else:
            rows, names = [], []
            for file in sorted((self._path / EPISODES).glob("*/*.parquet")):
                name = str(file.relative_to(self._path))
                parquet = open_parquet(file, name)
                with reading_arrow(name, "its content"):
                    kept = [key for key in parquet.schema_arrow.names if not key.startswith(("stats/", "videos/"))]
                    rows += parquet.read(columns=kept).to_pylist()
                names += [name] * (len(rows) - len(names))
        entries = [_validated(Entry, row, name) for row, name in zip(rows, names, strict=True)]
        entries.sort(key=lambda entry: entry.episode_index)
        twice = [a.episode_index for a, b in pairwise(entries) if a.episode_index == b.episode_index]
        if twice:
            raise self._refuse("episode-twice", f"'{EPISODES}' lists episode {twice[0]} twice: remove the stale entry.")
        if len(entries) != self._info.total_episodes or not entries:
            raise self._refuse(
                "missing-episodes",
                f"'{INFO}' says {self._info.total_episodes:,} episodes and '{EPISODES}' lists {len(entries):,}. "
                "Download or make it again.",
            )
        return entries

    def _understand_features(self) -> None:
        features = self._info.features
        present = ", ".join(features)
        spaces = {key: _space(feature) for key, feature in features.items() if _is_observation(key)}
        if self._settings.observation_keys is None:
            spaces = self._without_pictures(spaces)
        if not spaces or ACTION not in features:
            lacking = f"'{ACTION}'" if spaces else "'observation', 'observation.*' of numbers"
            raise self._refuse("missing-key", f"no feature {lacking}; features present: {present}.")
        self._understand_observations(spaces, self._settings.observation_keys)
        action = _space(features[ACTION])
        try:
            dtype = np.dtype(action.dtype)
        except TypeError:
            raise self._refuse("actions-dtype", f"'{ACTION}' is {action.dtype}: expected numbers.") from None
        beside = self._beside
        self._understand_actions(self._settings, action.shape, dtype, beside.n_actions, beside.bounds)
        self._marks = [key for key in MARKS if key in features]
        self._says_ends = (self._path / ENDS).exists()
        if not self._says_ends:
            self.findings.append(self._settings.said(" and ".join(f"'{key}'" for key in self._marks) or None))
        others = [key for key in features if key not in KNOWN and not _is_observation(key)]
        if others:
            self._note("other-keys", f"features not used: {', '.join(others)}.", count=len(others))

    def _without_pictures(self, spaces: dict[str, Space]) -> dict[str, Space]:
        pictures = [key for key, space in spaces.items() if space.dtype in PICTURES]
        if not pictures:
            return spaces
        names = ", ".join(f"{key} ({spaces[key].dtype})" for key in pictures)
        if self._settings.videos == "refuse":
            raise self._refuse(
                "pictures",
                f"observations that are pictures cannot be read: {names}. Leave them out with videos: leave_out, or "
                "choose others with observation_keys.",
            )
        self._note("pictures-left-out", f"left out, as asked: {names}.", Severity.WARNING, len(pictures))
        return {key: space for key, space in spaces.items() if key not in pictures}

    # ------------------------------------------------------------ rows

    def _files(self) -> Iterator[tuple[str, list[Entry]]]:
        """Each data file, by its path in the folder, with the episodes it should hold, in order."""

        def file_of(entry: Entry) -> str:
            try:
                return self._info.data_path.format(
                    episode_chunk=entry.episode_index // self._info.chunks_size,
                    episode_index=entry.episode_index,
                    chunk_index=entry.chunk_index,
                    file_index=entry.file_index,
                )
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise self._refuse("data-path", f"'{INFO}': data_path '{self._info.data_path}' ({error}).") from error

        for file, entries in groupby(self._entries, file_of):
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise self._refuse("data-path", f"'{INFO}': data_path leads out of the dataset, to '{file}'.")
            yield file, list(entries)

    def _batches(self, file: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        parquet = open_parquet(self._path / file, file)
        missing = [key for key in columns if key not in parquet.schema_arrow.names]
        if missing:
            present = ", ".join(parquet.schema_arrow.names)
            raise DatasetError(f"{file}: column '{missing[0]}' is missing; columns present: {present}.")
        with reading_arrow(file, "its rows"):
            yield from parquet.iter_batches(batch_size=ROWS, columns=list(columns))

    def _actions(self) -> Iterator[np.ndarray]:
        shape = self._info.features[ACTION].shape
        for file, _ in self._files():
            for batch in self._batches(file, [ACTION]):
                yield column_values(file, ACTION, batch.column(ACTION), shape)

    def _tables(self, file: str, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The rows of each episode in a file, in the order of the file."""
        parts: list[pa.RecordBatch] = []
        current = -1
        for batch in self._batches(file, columns):
            episodes = column_values(file, "episode_index", batch.column("episode_index"), ())
            cuts = np.flatnonzero(np.diff(episodes)) + 1
            for start, stop in pairwise([0, *cuts.tolist(), len(episodes)]):
                if parts and episodes[start] != current:
                    yield current, pa.Table.from_batches(parts)
                    parts = []
                current = int(episodes[start])
                parts.append(batch.slice(start, stop - start))
        if parts:
            yield current, pa.Table.from_batches(parts)

    def _episodes(self) -> Iterator[Episode]:
        features = self._info.features
        read = [*self._observations.keys, ACTION, *([REWARD] if REWARD in features else []), *self._marks]
        ends = self._ends()
        for file, entries in self._files():
            tables = self._tables(file, [*read, *PLACE])
            for entry in entries:
                table = self._rows_of(file, entry, *next(tables, (None, None)))
                values = {key: column_values(file, key, table.column(key), features[key].shape) for key in read}
                observations = {key: values[key] for key in self._observations.keys}
                if self._says_ends:
                    end = self._end_of(entry, next(ends, None))
                    last = np.arange(entry.length) == entry.length - 1
                    terminations, truncations = last & end.terminated, last & end.truncated
                    if end.final is not None:
                        observations = {key: np.concatenate([rows, end.final]) for key, rows in observations.items()}
                else:
                    marks = np.any([values[key].reshape(-1) for key in self._marks], axis=0) if self._marks else None
                    terminations, truncations = self._settings.flags(marks, len(values[ACTION]))
                yield Episode(
                    name=f"episode {entry.episode_index}",
                    observations=observations,
                    actions=values[ACTION],
                    rewards=values.get(REWARD),
                    terminations=terminations,
                    truncations=truncations,
                    marks=" or ".join(self._marks),
                )
            extra, _ = next(tables, (None, None))
            if extra is not None:
                raise DatasetError(f"{file}: holds episode {extra}, which '{EPISODES}' does not list there.")

    def _ends(self) -> Iterator[_End]:
        """How each episode ended, in order, as assay wrote it; nothing if it did not write the dataset."""
        if not self._says_ends:
            return
        shape = self._info.features[self._observations.keys[0]].shape
        flags = ("episode_index", "terminated", "truncated")
        for batch in self._batches(ENDS, [*flags, FINAL]):
            rows = [column_values(ENDS, key, batch.column(key), ()) for key in flags]
            finals = batch.column(FINAL)
            known = finals.is_valid().to_numpy(zero_copy_only=False)
            values = iter(column_values(ENDS, FINAL, finals.drop_null(), shape)[:, None])
            for episode, terminated, truncated, is_known in zip(*rows, known, strict=True):
                yield _End(int(episode), bool(terminated), bool(truncated), next(values) if is_known else None)

    def _end_of(self, entry: Entry, end: _End | None) -> _End:
        if end is None or end.episode != entry.episode_index:
            found = "says nothing of it" if end is None else f"goes on with episode {end.episode}"
            raise self._refuse(
                "stale-ends",
                f"'{EPISODES}' lists episode {entry.episode_index} where '{ENDS}' {found}: episodes were changed since "
                f"it was written. Delete '{ENDS}'; how episodes ended is then not known.",
            )
        return end

    def _rows_of(self, file: str, entry: Entry, episode: int | None, table: pa.Table | None) -> pa.Table:
        """The rows that come next in a file. Raises DatasetError unless they are all those of `entry`, in order."""
        expected = f"'{EPISODES}' says episode {entry.episode_index} of {entry.length:,} steps"
        if episode != entry.episode_index or table is None:
            found = "no further episode" if episode is None else f"episode {episode}"
            raise DatasetError(f"{file}: {expected} comes here, and there is {found}.")
        if len(table) != entry.length:
            raise DatasetError(f"{file}: {expected}, and {len(table):,} rows are there.")
        frames = column_values(file, "frame_index", table.column("frame_index"), ())
        wrong = np.flatnonzero(frames != np.arange(len(frames)))
        if len(wrong):
            raise DatasetError(
                f"{file}: episode {episode}: 'frame_index' is {frames[wrong[0]]} at step {wrong[0]:,}: the rows are "
                "out of order, or some are missing."
            )
        return table


M = TypeVar("M", bound=pydantic.BaseModel)


def _validated(model: type[M], value: object, name: str) -> M:
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DatasetError(f"{name}: '{where}': {first['msg'].lower()}. Download or make it again.") from error


def _is_observation(key: str) -> bool:
    return key == "observation" or key.startswith("observation.")


def _space(feature: Feature) -> Space:
    return Space(shape=feature.shape, dtype="text" if feature.dtype == "string" else feature.dtype)
