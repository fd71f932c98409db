"""Small recordings in D4RL's layout, with the habits of files found in the wild."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.readers.d4rl import D4RL
from data.readers.reader import RefusedError
from tests.data.readers.reading import Read, read_path


def recording(lengths: tuple[int, ...], seed: int = 0, dim: int = 3, jump: float = 4.0) -> dict[str, np.ndarray]:
    """Random walks of steps around 0.1; each episode begins far from where the one before stopped. No flags."""
    rng = np.random.default_rng(seed)
    observations, following = [], []
    for episode, n in enumerate(lengths):
        start = rng.normal(size=dim) + jump * (episode + 1) * (-1) ** episode
        walk = (start + np.cumsum(0.1 * rng.normal(size=(n + 1, dim)), axis=0)).astype(np.float32)
        observations.append(walk[:-1])
        following.append(walk[1:])
    n_steps = sum(lengths)
    return {
        "observations": np.concatenate(observations),
        "next_observations": np.concatenate(following),
        "actions": np.tanh(rng.normal(size=(n_steps, 2))).astype(np.float32),
        "rewards": np.arange(1, n_steps + 1, dtype=np.float32),
        "terminals": np.zeros(n_steps, bool),
    }


def last_rows(lengths: tuple[int, ...], episodes: tuple[int, ...] | None = None) -> np.ndarray:
    """[N] bool, the last rows of the given episodes (all, by default)."""
    flags = np.zeros(sum(lengths), bool)
    last = np.cumsum(lengths) - 1
    flags[last if episodes is None else last[list(episodes)]] = True
    return flags


@pytest.fixture(name="recording")
def _recording() -> Callable[..., dict[str, np.ndarray]]:
    return recording


@pytest.fixture(name="last_rows")
def _last_rows() -> Callable[..., np.ndarray]:
    return last_rows


@pytest.fixture
def read(write_hdf5: Callable[..., Path]) -> Callable[..., Read]:
    """Writes arrays as a D4RL file and reads it: `read(arrays, attributes, **settings)`."""

    def through_file(
        arrays: dict[str, np.ndarray] | Path, attributes: dict[str, object] | None = None, **settings: object
    ) -> Read:
        path = arrays if isinstance(arrays, Path) else write_hdf5("file.hdf5", attributes, **arrays)
        return read_path(D4RL.model_validate(settings), path)

    return through_file


@pytest.fixture
def refusal(read: Callable[..., Read]) -> Callable[..., str]:
    """What is said when a file is refused; it always begins with the file's name."""

    def message(arrays: dict[str, np.ndarray], attributes: dict[str, object] | None = None, **settings: object) -> str:
        with pytest.raises(RefusedError, match=r"^file\.hdf5: ") as caught:
            read(arrays, attributes, **settings)
        assert any(f.severity == "error" for f in caught.value.findings)
        return str(caught.value)

    return message
