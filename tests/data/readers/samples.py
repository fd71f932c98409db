"""One little recording written in every format, for the contract that every reader keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from data.readers.arrays import Arrays
from data.readers.d3rlpy import D3rlpy
from data.readers.d4rl import D4RL
from data.readers.episodes_npz import EpisodesNpz
from data.readers.lerobot import LeRobot
from data.readers.minari import Minari
from data.readers.reader import Reader
from data.readers.robomimic import Robomimic
from data.readers.table import Table

LENGTHS = (4, 6, 5, 3, 7, 4, 5, 6, 2, 8, 1, 5)
"""Steps of each episode: twelve episodes, so that the tenth is not read before the second; even ones terminate."""


@dataclass(frozen=True)
class Recording:
    """Episodes of random walks around far-apart starts.

    observations: of each episode [T + 1, 3] float32. actions: [T, 2] float32 in -1 .. 1. rewards: [T] float32.
    terminated: of each episode; the others were truncated.
    """

    observations: list[np.ndarray]
    actions: list[np.ndarray]
    rewards: list[np.ndarray]
    terminated: list[bool]


def recording() -> Recording:
    rng = np.random.default_rng(0)
    starts = [4.0 * (e + 1) * (-1) ** e for e in range(len(LENGTHS))]
    walks = [start + np.cumsum(0.1 * rng.normal(size=(n + 1, 3)), 0) for start, n in zip(starts, LENGTHS, strict=True)]
    return Recording(
        observations=[walk.astype(np.float32) for walk in walks],
        actions=[rng.uniform(-1, 1, (n, 2)).astype(np.float32) for n in LENGTHS],
        rewards=[rng.normal(size=n).astype(np.float32) for n in LENGTHS],
        terminated=[e % 2 == 0 for e in range(len(LENGTHS))],
    )


BLOCK, SLICE = "data.readers.recorded.BLOCK_BYTES", "data.readers.flat_source.SLICE_BYTES"


@dataclass(frozen=True)
class Sample:
    """How the recording is written in one format, and what that format can say.

    name: for the test's name. reader: that reads it. write: writes the recording under a folder, returns the path to
    read. piece: module attribute that says how many bytes are read or delivered at a time.
    recognised: whether the content alone gives `reader`; some formats need settings.
    says_kind: whether the format tells terminated from truncated; if not, all episodes are read as truncated.
    says_final: whether the format keeps the observation after the last step.
    dtype: of the numbers in the file.
    decisions: codes of findings that must be on record.
    """

    name: str
    reader: Reader
    write: Callable[[Path, Recording], Path]
    piece: str
    recognised: bool = True
    says_kind: bool = True
    says_final: bool = True
    dtype: str = "float32"
    decisions: frozenset[str] = frozenset()


def flat_arrays(recorded: Recording) -> dict[str, np.ndarray]:
    """One row a step, by D4RL's names."""
    last = np.cumsum([len(a) for a in recorded.actions]) - 1
    flags = {key: np.zeros(last[-1] + 1, bool) for key in ("terminals", "timeouts")}
    for row, terminated in zip(last, recorded.terminated, strict=True):
        flags["terminals" if terminated else "timeouts"][row] = True
    return {
        "observations": np.concatenate([o[:-1] for o in recorded.observations]),
        "next_observations": np.concatenate([o[1:] for o in recorded.observations]),
        "actions": np.concatenate(recorded.actions),
        "rewards": np.concatenate(recorded.rewards).astype(np.float64),
        **flags,
    }


def write_d4rl(folder: Path, recorded: Recording) -> Path:
    path = folder / "recording.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in flat_arrays(recorded).items():
            file[key] = values
    return path


def write_npz(folder: Path, recorded: Recording) -> Path:
    np.savez_compressed(folder / "recording.npz", **flat_arrays(recorded))
    return folder / "recording.npz"


def write_npy(folder: Path, recorded: Recording) -> Path:
    path = folder / "recording"
    path.mkdir()
    for key, values in flat_arrays(recorded).items():
        np.save(path / f"{key}.npy", values)
    return path


def write_robomimic(folder: Path, recorded: Recording) -> Path:
    path = folder / "demonstrations.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Toy", "type": 1, "env_kwargs": {}})
        for e, observations in enumerate(recorded.observations):
            demonstration = data.create_group(f"demo_{e}")
            n = demonstration.attrs["num_samples"] = len(recorded.actions[e])
            demonstration["obs/flat"], demonstration["next_obs/flat"] = observations[:-1], observations[1:]
            demonstration["actions"] = recorded.actions[e]
            demonstration["rewards"] = recorded.rewards[e].astype(np.float64)
            demonstration["dones"] = np.arange(n) == n - 1
        data.attrs["total"] = sum(len(actions) for actions in recorded.actions)
    return path


def minari_metadata(recorded: Recording, data_format: str) -> str:
    """What Minari writes beside the data."""
    observation = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-np.inf] * 3, "high": [np.inf] * 3}
    action = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0] * 2, "high": [1.0] * 2}
    return json.dumps(
        {
            "total_episodes": len(recorded.actions),
            "total_steps": sum(len(actions) for actions in recorded.actions),
            "data_format": data_format,
            "observation_space": json.dumps(observation),
            "action_space": json.dumps(action),
            "dataset_id": "toy/recording-v0",
        }
    )


def minari_columns(recorded: Recording, episode: int) -> dict[str, np.ndarray]:
    last = np.arange(len(recorded.actions[episode])) == len(recorded.actions[episode]) - 1
    return {
        "observations": recorded.observations[episode],
        "actions": recorded.actions[episode],
        "rewards": recorded.rewards[episode].astype(np.float64),
        "terminations": last & recorded.terminated[episode],
        "truncations": last & (not recorded.terminated[episode]),
    }


def write_minari_hdf5(folder: Path, recorded: Recording) -> Path:
    path = folder / "recording-v0"
    (path / "data").mkdir(parents=True)
    (path / "data" / "metadata.json").write_text(minari_metadata(recorded, "hdf5"))
    with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
        for e in range(len(recorded.actions)):
            for key, values in minari_columns(recorded, e).items():
                file[f"episode_{e}/{key}"] = values
            file[f"episode_{e}"].attrs["total_steps"] = len(recorded.actions[e])
    return path


def write_minari_arrow(folder: Path, recorded: Recording) -> Path:
    path = folder / "recording-v0"
    for e, actions in enumerate(recorded.actions):
        part = path / "data" / str(e)
        part.mkdir(parents=True)
        (part / "metadata.json").write_text(json.dumps({"id": e, "total_steps": len(actions)}))
        columns = minari_columns(recorded, e)
        padded = {
            key: np.concatenate([values, np.zeros_like(values[:1])]) if key != "observations" else values
            for key, values in columns.items()
        }
        table = pa.table({key: lists(values) for key, values in padded.items()})
        with pa.ipc.new_file(part / "part-0.arrow", table.schema) as file:
            file.write_table(table)
    (path / "data" / "metadata.json").write_text(minari_metadata(recorded, "arrow"))
    return path


def lerobot_info(recorded: Recording, version: str, data_path: str) -> dict[str, object]:
    kinds = {
        "observation.state": ("float32", 3),
        "action": ("float32", 2),
        "next.reward": ("float32", 1),
        "next.done": ("bool", 1),
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", 1)),
    }
    return {
        "codebase_version": version,
        "total_episodes": len(recorded.actions),
        "total_frames": sum(len(actions) for actions in recorded.actions),
        "chunks_size": 1000,
        "fps": 50,
        "data_path": data_path,
        "features": {key: {"dtype": dtype, "shape": [n], "names": None} for key, (dtype, n) in kinds.items()},
    }


def lerobot_rows(recorded: Recording, episode: int) -> pa.Table:
    n, before = len(recorded.actions[episode]), sum(len(actions) for actions in recorded.actions[:episode])
    return pa.table(
        {
            "observation.state": lists(recorded.observations[episode][:-1]),
            "action": lists(recorded.actions[episode]),
            "next.reward": recorded.rewards[episode],
            "next.done": np.arange(n) == n - 1,
            "frame_index": np.arange(n),
            "episode_index": np.full(n, episode),
            "index": np.arange(before, before + n),
            "task_index": np.zeros(n, np.int64),
        }
    )


def write_lerobot_v2(folder: Path, recorded: Recording) -> Path:
    path = folder / "recording"
    (path / "meta").mkdir(parents=True)
    (path / "data" / "chunk-000").mkdir(parents=True)
    data_path = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    (path / "meta" / "info.json").write_text(json.dumps(lerobot_info(recorded, "v2.1", data_path)))
    lengths = [len(actions) for actions in recorded.actions]
    lines = [json.dumps({"episode_index": e, "tasks": ["walk"], "length": n}) for e, n in enumerate(lengths)]
    (path / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    for e in range(len(recorded.actions)):
        pq.write_table(lerobot_rows(recorded, e), path / "data" / "chunk-000" / f"episode_{e:06d}.parquet")
    return path


def write_lerobot_v3(folder: Path, recorded: Recording) -> Path:
    """Five episodes a file."""
    path = folder / "recording"
    (path / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    (path / "data" / "chunk-000").mkdir(parents=True)
    data_path = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    (path / "meta" / "info.json").write_text(json.dumps(lerobot_info(recorded, "v3.0", data_path)))
    episodes = range(len(recorded.actions))
    described = {
        "episode_index": list(episodes),
        "tasks": [["walk"] for _ in episodes],
        "length": [len(actions) for actions in recorded.actions],
        "data/chunk_index": [0 for _ in episodes],
        "data/file_index": [e // 5 for e in episodes],
        "stats/action/mean": [[0.0, 0.0] for _ in episodes],
    }
    pq.write_table(pa.table(described), path / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    for start in episodes[::5]:
        rows = pa.concat_tables([lerobot_rows(recorded, e) for e in episodes[start : start + 5]])
        pq.write_table(rows, path / "data" / "chunk-000" / f"file-{start // 5:03d}.parquet", row_group_size=7)
    return path


def write_d3rlpy(folder: Path, recorded: Recording) -> Path:
    path = folder / "dump.h5"
    with h5py.File(path, "w") as file:
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"] = len(recorded.actions)
        for e, observations in enumerate(recorded.observations):
            file[f"observations_{e}"], file[f"actions_{e}"] = observations[:-1], recorded.actions[e]
            file[f"rewards_{e}"] = recorded.rewards[e][:, None].astype(np.float64)
            file[f"terminated_{e}"] = recorded.terminated[e]
        file["version"] = "2.1"
    return path


def step_table(recorded: Recording) -> pl.DataFrame:
    """One row a step, and one for the observation after the last; shuffled."""
    parts = []
    for e, observations in enumerate(recorded.observations):
        n = len(recorded.actions[e])
        parts.append(
            pl.DataFrame(
                {
                    "run": [f"run-{e}"] * (n + 1),
                    "t": range(n + 1),
                    **{f"x{i}": observations[:, i] for i in range(3)},
                    **{f"u{i}": [*recorded.actions[e][:, i], None] for i in range(2)},
                    "reward": [*recorded.rewards[e].astype(float), None],
                    "end": [*[None] * (n - 1), "crash" if recorded.terminated[e] else "limit", None],
                },
                schema_overrides=dict.fromkeys(("u0", "u1"), pl.Float32),
            )
        )
    return pl.concat(parts).sample(fraction=1, shuffle=True, seed=0)


def write_csv(folder: Path, recorded: Recording) -> Path:
    step_table(recorded).write_csv(folder / "steps.csv")
    return folder / "steps.csv"


def write_parquet(folder: Path, recorded: Recording) -> Path:
    """In order, so that it is read in pieces."""
    rows = step_table(recorded).sort(pl.col("run").str.slice(4).cast(int), "t")
    rows.write_parquet(folder / "steps.parquet", row_group_size=7)
    return folder / "steps.parquet"


def write_arrow(folder: Path, recorded: Recording) -> Path:
    step_table(recorded).write_ipc(folder / "steps.arrow")
    return folder / "steps.arrow"


def episode_rows(recorded: Recording, episode: int, empty: int) -> dict[str, np.ndarray]:
    """T + 1 rows; actions and rewards of the first (0) or last (-1) are empty."""
    n = len(recorded.actions[episode])
    around = (1, 0) if empty == 0 else (0, 1)
    return {
        "observation": recorded.observations[episode],
        "action": np.pad(recorded.actions[episode], (around, (0, 0))),
        "reward": np.pad(recorded.rewards[episode].astype(np.float64), around),
        "is_first": np.arange(n + 1) == 0,
        "is_last": np.arange(n + 1) == n,
        "is_terminal": (np.arange(n + 1) == n) & recorded.terminated[episode],
    }


def write_episodes(folder: Path, recorded: Recording, empty: int) -> Path:
    for e in range(len(recorded.actions)):
        np.savez_compressed(folder / f"episode-{e}.npz", **episode_rows(recorded, e, empty))
    return folder


def lists(values: np.ndarray) -> pa.Array:
    """A column of scalars, or of lists of one length."""
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(values.reshape(-1), values.shape[1])


SAMPLES = (
    Sample("d4rl", D4RL(), write_d4rl, SLICE, decisions=frozenset({"converted"})),
    Sample("arrays npz", Arrays(), write_npz, SLICE, decisions=frozenset({"keys", "converted"})),
    Sample("arrays npy", Arrays(), write_npy, SLICE, decisions=frozenset({"keys", "converted"})),
    Sample(
        "d3rlpy",
        D3rlpy(),
        write_d3rlpy,
        BLOCK,
        says_final=False,
        decisions=frozenset({"converted", "final-observation-unknown", "final-observation-not-needed"}),
    ),
    Sample(
        "robomimic",
        Robomimic(),
        write_robomimic,
        BLOCK,
        says_kind=False,
        decisions=frozenset({"ends-taken", "observation-keys", "converted"}),
    ),
    Sample("minari hdf5", Minari(), write_minari_hdf5, BLOCK, decisions=frozenset({"converted"})),
    Sample("minari arrow", Minari(), write_minari_arrow, BLOCK, decisions=frozenset({"converted"})),
    *(
        Sample(
            f"episodes npz {name}",
            EpisodesNpz(),
            partial(write_episodes, empty=empty),
            BLOCK,
            decisions=frozenset({"layout-taken", "converted"}),
        )
        for name, empty in (("rlds", -1), ("dreamer", 0))
    ),
    *(
        Sample(
            f"table {name}",
            Table(),
            write,
            BLOCK,
            dtype=dtype,
            decisions=frozenset({"columns", "ends-taken", "converted"}),
        )
        for name, write, dtype in (
            ("csv", write_csv, "float64"),
            ("parquet", write_parquet, "float32"),
            ("arrow", write_arrow, "float32"),
        )
    ),
    *(
        Sample(
            name,
            LeRobot(),
            write,
            BLOCK,
            says_kind=False,
            says_final=False,
            decisions=frozenset({"ends-taken", "observation-keys", "final-observation-unknown"}),
        )
        for name, write in (("lerobot v2", write_lerobot_v2), ("lerobot v3", write_lerobot_v3))
    ),
)
"""At least one for each reader: a new one is under contract once it is here."""
