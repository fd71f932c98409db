"""Minari: a folder with one HDF5 group an episode and `metadata.json`, as `minari.load_dataset` reads it.

    data/main_data.hdf5   episode_0/observations   [T + 1, ...], or [T, ...] where the last one was not recorded
                          episode_0/actions, rewards, terminations, truncations   [T, ...]
    data/metadata.json    counts, spaces, and where the dataset came from

The folder's name is the dataset's id: put it into `MINARI_DATASETS_PATH` under that name. Rewards are NaN without
labels, since Minari cannot leave them out. Images are stored as they are, not as JPEG.
(Farama Foundation, minari.farama.org, "Dataset Standards", as of version 0.5.4.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import JsonValue

from data.errors import ConfigurationError
from data.findings import Finding, Severity
from data.readers.reader import Block
from data.store import ArraySpec, DatasetManifest
from data.writers.writer import Contents, Writer

VERSION = "0.5.4"

ID = re.compile(r"[-\w]+-v\d+", re.ASCII)


class MinariWriter(Writer):
    """Writes Minari datasets."""

    kind: Literal["minari"] = "minari"

    def write(self, path: Path, contents: Contents, blocks: Iterable[Block]) -> list[Finding]:
        if not ID.fullmatch(path.name):
            raise ConfigurationError(
                f"{path.name}: the folder of a Minari dataset is named like its id, with a version: '{path.name}-v0'."
            )
        folder = path / "data"
        folder.mkdir(parents=True)
        with h5py.File(folder / "main_data.hdf5", "w", track_order=True) as file:
            episode = 0
            for block in blocks:
                for own in range(block.trajectories.n_episodes):
                    _write_episode(file.create_group(f"episode_{episode}"), episode, block, own)
                    episode += 1
        size = (folder / "main_data.hdf5").stat().st_size
        metadata = _metadata(path.name, contents.dataset, size) | contents.provenance
        (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
        if contents.labels is not None:
            return []
        message = "all 'rewards' are NaN: no labels were asked for, and Minari cannot leave them out."
        return [Finding(code="no-rewards", severity=Severity.NOTE, message=message)]


def _write_episode(group: h5py.Group, number: int, block: Block, own: int) -> None:
    """Write episode `own` of a block."""
    episodes = block.trajectories
    steps = slice(int(episodes.offsets[own]), int(episodes.offsets[own + 1]))
    n = steps.stop - steps.start
    group.attrs["id"], group.attrs["total_steps"] = number, n
    n_observed = n + int(episodes.final_observed[own])
    first = steps.start + own
    group["observations"] = episodes.observations[first : first + n_observed]
    group["actions"] = episodes.actions[steps]
    group["rewards"] = np.full(n, np.nan, np.float32) if block.rewards is None else block.rewards[steps]
    last = np.arange(n) == n - 1
    group["terminations"], group["truncations"] = last & episodes.terminated[own], last & episodes.truncated[own]


def _metadata(name: str, dataset: DatasetManifest, n_bytes: int) -> dict[str, JsonValue]:
    return {
        "total_episodes": dataset.n_episodes,
        "total_steps": dataset.n_steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(_box(dataset.observation, None)),
        "action_space": json.dumps(_action_space(dataset)),
        "dataset_id": name,
        "dataset_size": round(n_bytes / 1e6, 1),
        "minari_version": VERSION,
    }


def _action_space(dataset: DatasetManifest) -> dict[str, JsonValue]:
    counts = dataset.n_actions
    if counts is None:
        return _box(dataset.action, dataset.action_bounds)
    if dataset.action.shape:
        zeros = [0] * len(counts)
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(counts), "start": list[JsonValue](zeros)}
    return {"type": "Discrete", "dtype": "int64", "start": 0, "n": counts[0]}


def _box(array: ArraySpec, bounds: tuple[float, float] | None) -> dict[str, JsonValue]:
    """A space of numbers, within the limits of their dtype unless bounds are known."""
    low: float
    high: float
    if bounds is not None:
        low, high = bounds
    elif np.dtype(array.dtype).kind == "f":
        low, high = -np.inf, np.inf
    else:
        limits = np.iinfo(array.dtype)
        low, high = limits.min, limits.max
    said: dict[str, JsonValue] = {"type": "Box", "dtype": array.dtype, "shape": list(array.shape)}
    return said | {key: np.full(array.shape, value).tolist() for key, value in (("low", low), ("high", high))}
