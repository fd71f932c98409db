"""Checking a file says all there is to say of it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.check import check

Write = Callable[..., Path]


def arrays(n: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(n, 2)),
        "actions": rng.uniform(-1, 1, (n, 1)).astype(np.float32),
        "rewards": np.arange(n, dtype=np.float32),
        "terminals": np.arange(n) == 2,
        "timeouts": np.arange(n) == n - 1,
    }


def test_a_sound_file_is_described(write_hdf5: Write) -> None:
    said = check(write_hdf5("a.hdf5", **arrays())).to_json()
    problems = said.pop("problems")
    assert said == {
        "format": "d4rl",
        "episodes": 2,
        "steps": 6,
        "terminated": 1,
        "truncated": 1,
        "observation": {"shape": [2], "dtype": "float64"},
        "action": {"shape": [1], "dtype": "float32", "discrete": False},
        "reward_sum": 15.0,
    }
    assert isinstance(problems, list)
    assert all(problem.keys() == {"code", "severity", "episode", "message"} for problem in problems)
    assert "converted" in [problem["code"] for problem in problems]


def test_what_cannot_be_ingested_is_refused_with_every_reason(write_hdf5: Write) -> None:
    spoiled = arrays()
    spoiled["observations"][4, 1] = np.nan
    spoiled["actions"][1] = np.inf
    found = check(write_hdf5("a.hdf5", **spoiled))
    assert found.refused
    said = found.to_json()
    assert said["format"] == "d4rl"
    assert said["episodes"] is None and said["reward_sum"] is None
    reasons = [p for p in found.problems if p.severity == "error"]
    assert {(p.episode, p.step) for p in reasons} == {(1, 1), (0, 1)}


@pytest.mark.parametrize("values", [[np.nan, 0.0], [np.inf, -np.inf]])
def test_rewards_that_are_not_finite_have_no_sum_and_stop_nothing(write_hdf5: Write, values: list[float]) -> None:
    spoiled = arrays()
    spoiled["rewards"][:2] = values
    found = check(write_hdf5("a.hdf5", **spoiled))
    assert not found.refused
    assert found.to_json()["reward_sum"] is None
    assert found.to_json()["steps"] == 6


def test_a_file_of_no_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"nothing of the kind")
    found = check(tmp_path / "a.bin")
    assert found.refused and found.format is None
    assert "a.bin" in found.problems[0].message


def test_nothing_is_written(write_hdf5: Write, tmp_path: Path) -> None:
    path = write_hdf5("a.hdf5", **arrays())
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    check(path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("n_actions", [None, (3,)])
def test_discrete_is_by_dtype(write_hdf5: Write, n_actions: tuple[int, ...] | None) -> None:
    made = arrays()
    if n_actions:
        made["actions"] = np.array([0, 2, 1, 0, 0, 2])
    said = check(write_hdf5("a.hdf5", **made)).to_json()["action"]
    assert isinstance(said, dict)
    assert said["discrete"] is (n_actions is not None)
