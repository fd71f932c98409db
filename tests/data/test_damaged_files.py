"""Damaged files are read to the right answer or refused by name: no traceback, no hang, nothing half-made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds without an outcome after which a file is said to hang."""


def outcomes(first: int, last: int, folder: Path) -> dict[int, str]:
    """What became of the damaged file of each seed. A library may crash on one: the next process goes on after it."""
    found: dict[int, str] = {}
    start = first
    while start < last:
        command = [sys.executable, "-m", "tests.data.damage", str(start), str(last), str(folder)]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            seen, at = -1, time.monotonic()
            while process.poll() is None:
                done = len(list(folder.glob("*.txt")))
                if done != seen:
                    seen, at = done, time.monotonic()
                if time.monotonic() - at > PATIENCE:
                    process.kill()
                time.sleep(0.05)
        for seed in range(start, last):
            result = folder / f"{seed}.txt"
            if result.exists():
                found[seed] = result.read_text(encoding="utf-8")
            elif (folder / f"{seed}.started").exists():
                found[seed] = f"WRONG: seed {seed}: the process ended with {process.returncode}"
                break
            else:
                break
        if len(found) == (start - first):
            raise AssertionError(f"the process ended with {process.returncode} before it began")
        start = first + len(found)
    return found


def check(found: dict[int, str]) -> None:
    wrong = [said for said in found.values() if said.startswith("WRONG")]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:5])
    assert {"read", "refused"} <= set(found.values())


def test_damaged_files(tmp_path: Path) -> None:
    check(outcomes(0, 60, tmp_path))


@pytest.mark.drill
def test_two_thousand_damaged_files(tmp_path: Path) -> None:
    check(outcomes(1000, 3000, tmp_path))
