"""LeRobot 3.0: a folder of Parquet files with one row a step, and `meta/` that describes them.

    meta/info.json                         version, counts, features
    meta/stats.json, meta/tasks.parquet    moments of vectors; the one task, named like the dataset
    meta/episodes/chunk-000/file-000.parquet   length and place of each episode
    data/chunk-000/file-000.parquet        observation.state (observation.image for more than one axis), action,
                                           next.reward (left out without labels), next.done, and the usual indices
    meta/assay.json, meta/assay.parquet    what LeRobot has no place for and passes over: what actions are, where the
                                           dataset came from; of each episode how it ended (`terminated`, `truncated`)
                                           and the observation after its last step, null where it was not recorded

Images are arrays of whole numbers, not pictures, so that they stay as they are. LeRobot wants a frame rate, which a
dataset does not have: it is 1, and time stamps count steps.
(Cadene et al. 2024, github.com/huggingface/lerobot, `LeRobotDataset`, codebase version 3.0.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from data.findings import Finding, Severity
from data.readers.reader import Block
from data.store import DatasetManifest
from data.trajectories import Trajectories
from data.writers.writer import Contents, Writer

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILE_BYTES, CHUNK_FILES = 100_000_000, 1000
"""A data file has about so many bytes, a folder (chunk) so many files, as LeRobot writes them."""

FRAME_RATE = 1


class LeRobotWriter(Writer):
    """Writes LeRobot datasets."""

    kind: Literal["lerobot"] = "lerobot"

    def write(self, path: Path, contents: Contents, blocks: Iterable[Block]) -> list[Finding]:
        dataset = contents.dataset
        with ExitStack() as files:

            def begin(name: str) -> _Parquet:
                return files.enter_context(closing(_Parquet(path / name)))

            episodes, ends = begin("meta/episodes/chunk-000/file-000.parquet"), begin("meta/assay.parquet")
            data = begin(_data_file(0))
            n_files, n_episodes, n_steps = 1, 0, 0
            for block in blocks:
                if data.n_bytes >= FILE_BYTES:
                    data.close()
                    data = begin(_data_file(n_files))
                    n_files += 1
                data.write(_steps(block, n_episodes, n_steps))
                episodes.write(_entries(block.trajectories, n_episodes, n_steps, n_files - 1, dataset.name))
                ends.write(_ends(block.trajectories, n_episodes))
                n_episodes += block.trajectories.n_episodes
                n_steps += block.trajectories.n_steps
        pq.write_table(_tasks(dataset.name), path / "meta" / "tasks.parquet")
        _write_json(path / "meta" / "info.json", _info(contents))
        _write_json(path / "meta" / "stats.json", _statistics(dataset))
        kind: dict[str, JsonValue] = {"n_actions": _listed(dataset.n_actions), "bounds": _listed(dataset.action_bounds)}
        _write_json(path / "meta" / "assay.json", kind | contents.provenance)
        message = "LeRobot wants a frame rate and the dataset has none: 1 is written, and time stamps count steps."
        findings = [Finding(code="frame-rate", severity=Severity.NOTE, message=message)]
        if contents.labels is None:
            message = "written without 'next.reward': no labels were asked for."
            findings.append(Finding(code="no-rewards", severity=Severity.NOTE, message=message))
        return findings


class _Parquet:
    """A Parquet file that grows by a row group with every table; begun with the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self.n_bytes = 0
        """Written so far, before compression."""

    def write(self, table: pa.Table) -> None:
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
        self.n_bytes += table.nbytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


# ---------------------------------------------------------------- tables


def _steps(block: Block, first_episode: int, first_step: int) -> pa.Table:
    """The rows of a block, one a step. first_episode, first_step: how many were written before."""
    episodes = block.trajectories
    n = episodes.n_steps
    frames = np.arange(n) - episodes.offsets[episodes.episode_index]
    done = np.zeros(n, bool)
    done[episodes.offsets[1:] - 1] = True
    columns = {
        _observation_key(episodes.observations.shape[1:]): _column(episodes.step_observations),
        "action": _column(np.asarray(episodes.actions)),
        "next.done": pa.array(done),
        "timestamp": pa.array((frames / FRAME_RATE).astype(np.float32)),
        "frame_index": pa.array(frames),
        "episode_index": pa.array(first_episode + episodes.episode_index),
        "index": pa.array(first_step + np.arange(n)),
        "task_index": pa.array(np.zeros(n, np.int64)),
    }
    return pa.table(columns if block.rewards is None else columns | {"next.reward": pa.array(block.rewards)})


def _entries(episodes: Trajectories, first_episode: int, first_step: int, file: int, task: str) -> pa.Table:
    """Where the episodes of a block lie. file: the data file's number."""
    n = episodes.n_episodes
    chunk, file = divmod(file, CHUNK_FILES)
    fixed = {"data/chunk_index": chunk, "data/file_index": file, "meta/episodes/chunk_index": 0}
    return pa.table(
        {
            "episode_index": pa.array(first_episode + np.arange(n)),
            "tasks": pa.array([[task]] * n),
            "length": pa.array(episodes.lengths),
            "dataset_from_index": pa.array(first_step + episodes.offsets[:-1]),
            "dataset_to_index": pa.array(first_step + episodes.offsets[1:]),
            **{key: pa.array(np.full(n, value)) for key, value in (fixed | {"meta/episodes/file_index": 0}).items()},
        }
    )


def _ends(episodes: Trajectories, first_episode: int) -> pa.Table:
    """How the episodes of a block ended, and the observation after their last step where it is known."""
    n = episodes.n_episodes
    finals = episodes.observations[episodes.offsets[1:] + np.arange(n)].reshape(n, -1)
    places = pa.array(np.arange(n + 1, dtype=np.int32) * finals.shape[1])
    unknown = pa.array(~episodes.final_observed)
    return pa.table(
        {
            "episode_index": pa.array(first_episode + np.arange(n)),
            "terminated": pa.array(episodes.terminated),
            "truncated": pa.array(episodes.truncated),
            "final_observation": pa.ListArray.from_arrays(places, pa.array(finals.reshape(-1)), mask=unknown),
        }
    )


def _tasks(task: str) -> pa.Table:
    """The one task, as a table whose index pandas knows, which LeRobot reads it with."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0"}
    table = pa.table({"task_index": [0], "task": [task]})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _column(rows: np.ndarray) -> pa.Array:
    """Lists nested as deep as a row has axes; a number for rows of one number, as LeRobot's own shape (1,) means."""
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    if rows.shape[1:] == (1,):
        return column
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


# ---------------------------------------------------------------- description


def _info(contents: Contents) -> dict[str, JsonValue]:
    dataset = contents.dataset
    features: dict[str, JsonValue] = {
        _observation_key(dataset.observation.shape): _feature(dataset.observation.dtype, dataset.observation.shape),
        "action": _feature(dataset.action.dtype, dataset.action.shape or (1,)),
        "next.done": _feature("bool", (1,)),
        "timestamp": _feature("float32", (1,)),
        **{key: _feature("int64", (1,)) for key in ("frame_index", "episode_index", "index", "task_index")},
    }
    if contents.labels is not None:
        features["next.reward"] = _feature("float32", (1,))
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": dataset.n_episodes,
        "total_frames": dataset.n_steps,
        "total_tasks": 1,
        "chunks_size": CHUNK_FILES,
        "data_files_size_in_mb": FILE_BYTES // 10**6,
        "video_files_size_in_mb": 200,
        "fps": FRAME_RATE,
        "splits": {"train": f"0:{dataset.n_episodes}"},
        "data_path": DATA_PATH,
        "video_path": None,
        "features": features,
    }


def _feature(dtype: str, shape: tuple[int, ...]) -> dict[str, JsonValue]:
    return {"dtype": dtype, "shape": list(shape), "names": None}


def _statistics(dataset: DatasetManifest) -> dict[str, JsonValue]:
    """Moments of observations and actions that are vectors of floats."""
    said: dict[str, JsonValue] = {}
    for key, array, name in (
        (_observation_key(dataset.observation.shape), dataset.observation, "observations"),
        ("action", dataset.action, "actions"),
    ):
        if len(array.shape) == 1 and np.dtype(array.dtype).kind == "f":
            moments = dataset.statistics[name]
            values = {"min": "minimum", "max": "maximum", "mean": "mean", "std": "std"}
            said[key] = {**{ours: moments[theirs] for ours, theirs in values.items()}, "count": [moments["count"]]}
    return said


def _observation_key(shape: tuple[int, ...]) -> str:
    return "observation.state" if len(shape) == 1 else "observation.image"


def _data_file(number: int) -> str:
    chunk, file = divmod(number, CHUNK_FILES)
    return DATA_PATH.format(chunk_index=chunk, file_index=file)


def _listed(values: tuple[float, ...] | None) -> list[JsonValue] | None:
    return None if values is None else list(values)


def _write_json(path: Path, value: Mapping[str, JsonValue]) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
