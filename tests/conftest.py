"""What all tests share. Warnings are errors (pyproject.toml)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch and numpy start their threads: spinning threads of several processes starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import h5py
import numpy as np
import pytest

from data.trajectories import Trajectories


@pytest.fixture(scope="session")
def hopper() -> Path:
    """Folder of the real example files: `hopper-expert.hdf5`, `hopper-replay.hdf5`."""
    return Path(__file__).parents[1] / "examples" / "hopper"


@pytest.fixture
def write_hdf5(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small HDF5 file: `write_hdf5("a.hdf5", {"env": "x"}, observations=..., infos__goal=...)`."""

    def write(name: str, attributes: dict[str, object] | None = None, **arrays: object) -> Path:
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, value in arrays.items():
                file.create_dataset(key.replace("__", "/"), data=value)
            for key, value in (attributes or {}).items():
                file.attrs[key] = value
        return path

    return write


@pytest.fixture
def random_trajectories() -> Callable[..., Trajectories]:
    """Makes random episodes of given lengths; the first terminates, the second is truncated, and so on."""

    def make(
        lengths: tuple[int, ...] = (5, 1, 7), width: int = 3, n_actions: tuple[int, ...] | None = None, seed: int = 0
    ) -> Trajectories:
        rng = np.random.default_rng(seed)
        n_steps, n_episodes = sum(lengths), len(lengths)
        terminated = np.arange(n_episodes) % 2 == 0
        if n_actions is None:
            actions = rng.uniform(-1, 1, (n_steps, 2)).astype(np.float32)
        else:
            actions = np.stack([rng.integers(0, n, n_steps) for n in n_actions], 1)
            actions = actions[:, 0] if len(n_actions) == 1 else actions
        return Trajectories(
            observations=rng.normal(size=(n_steps + n_episodes, width)).astype(np.float32),
            actions=actions,
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            terminated=terminated,
            truncated=~terminated,
            final_observed=np.ones(n_episodes, bool),
            n_actions=n_actions,
            action_bounds=None if n_actions else (-1.0, 1.0),
        )

    return make
