"""One little recording written in every format, for the contract that every reader keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from data.readers.d4rl import D4RL
from data.readers.reader import Reader
from data.readers.robomimic import Robomimic

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


@dataclass(frozen=True)
class Sample:
    """How the recording is written in one format, and what that format can say.

    name: for the test's name. reader: that reads it. write: writes the recording under a folder, returns the path to
    read. piece: module attribute that says how many bytes are read or delivered at a time.
    recognised: whether the content alone gives `reader`; some formats need settings.
    says_kind: whether the format tells terminated from truncated; if not, all episodes are read as truncated.
    says_final: whether the format keeps the observation after the last step.
    decisions: codes of findings that must be on record.
    """

    name: str
    reader: Reader
    write: Callable[[Path, Recording], Path]
    piece: str
    recognised: bool = True
    says_kind: bool = True
    says_final: bool = True
    decisions: frozenset[str] = frozenset()


def write_d4rl(folder: Path, recorded: Recording) -> Path:
    last = np.cumsum([len(a) for a in recorded.actions]) - 1
    flags = {key: np.zeros(last[-1] + 1, bool) for key in ("terminals", "timeouts")}
    for row, terminated in zip(last, recorded.terminated, strict=True):
        flags["terminals" if terminated else "timeouts"][row] = True
    path = folder / "recording.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.concatenate([o[:-1] for o in recorded.observations])
        file["next_observations"] = np.concatenate([o[1:] for o in recorded.observations])
        file["actions"] = np.concatenate(recorded.actions)
        file["rewards"] = np.concatenate(recorded.rewards).astype(np.float64)
        for key, values in flags.items():
            file[key] = values
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


SAMPLES = (
    Sample("d4rl", D4RL(), write_d4rl, "data.readers.d4rl.SLICE_BYTES", decisions=frozenset({"converted"})),
    Sample(
        "robomimic",
        Robomimic(),
        write_robomimic,
        "data.readers.recorded.BLOCK_BYTES",
        says_kind=False,
        decisions=frozenset({"ends-taken", "observation-keys", "converted"}),
    ),
)
"""At least one for each reader: a new one is under contract once it is here."""
