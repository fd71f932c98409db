from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from pipelines.home import Home, quieten

quieten()

WriteStudy = Callable[..., Path]


@pytest.fixture(scope="session")
def tracked_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with an empty tracking database, to copy: making one takes seconds."""
    from pipelines.tracking import Tracker

    home = Home(tmp_path_factory.mktemp("tracked") / "home")
    Tracker.open(home, None, "template")
    return home.path


@pytest.fixture
def home(tracked_home: Path, tmp_path: Path) -> Home:
    shutil.copytree(tracked_home, tmp_path / "home")
    return Home(tmp_path / "home")


STUDY: dict[str, Any] = {
    "study": "tiny",
    "datasets": {"replay": {"path": "replay.hdf5", "demonstrations": "expert", "environment": "Pendulum-v1"}},
    "demonstrations": {"expert": {"path": "expert.hdf5"}},
    "labelers": {
        "source": {"kind": "source"},
        "zero": {"kind": "zero"},
        "transport": {"kind": "optimal_transport", "demonstrations": {"episodes": [0]}},
    },
    "transforms": [{"kind": "return_range"}],
    "algorithms": {"iql": {"kind": "iql", "hidden": [16, 16]}},
    "seeds": [0, 1],
    "training": {"steps": 300, "batch_size": 16, "log_every": 50, "checkpoint_every": 50},
    "evaluation": {"episodes": 1},
}
"""A study of six short runs on made-up data that has the shape of a real environment's."""


def write_episodes(path: Path, n_episodes: int, seed: int, width: int = 3) -> None:
    """A D4RL file of random episodes, of 5 to 24 steps, with rewards that depend on observation and action."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 25, n_episodes)
    n = int(lengths.sum())
    last = np.zeros(n, bool)
    last[np.cumsum(lengths) - 1] = True
    observations = np.cumsum(rng.normal(size=(n + 1, width)), 0).astype(np.float32)
    actions = rng.uniform(-2, 2, (n, 1)).astype(np.float32)
    arrays: dict[str, np.ndarray] = {
        "observations": observations[:-1],
        "next_observations": observations[1:],
        "actions": actions,
        "rewards": (observations[:-1, 0] - actions[:, 0]).astype(np.float32),
        "terminals": last & (rng.random(n) < 0.5),
    }
    arrays["timeouts"] = last & ~arrays["terminals"]
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
        file.attrs["action_low"], file.attrs["action_high"] = -2.0, 2.0


@pytest.fixture(scope="session")
def write_study() -> WriteStudy:
    """Writes the tiny study and its files into a folder, and returns the study file.

    `write_study(folder, seeds=[0])` changes a key, None leaves it out.
    """

    def write(folder: Path, **changes: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_episodes(folder / "replay.hdf5", n_episodes=12, seed=0)
        write_episodes(folder / "expert.hdf5", n_episodes=2, seed=1)
        said = {key: value for key, value in (STUDY | changes).items() if value is not None}
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
        return path

    return write
