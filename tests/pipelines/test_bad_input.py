"""Input that is wrong ends in one clear message and exit code 2, and leaves store and tracking as they were."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipelines.cli import _main
from pipelines.home import Home

WriteStudy = Callable[..., Path]


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(change: Callable[[h5py.File], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return apply


def rename_actions(file: h5py.File) -> None:
    file.move("actions", "action")


def drop_last_action(file: h5py.File) -> None:
    actions = file["actions"][:-1]
    del file["actions"]
    file["actions"] = actions


def spoil_an_observation(file: h5py.File) -> None:
    lengths = np.flatnonzero(file["terminals"][...] | file["timeouts"][...])
    file["observations"][lengths[1] + 3, 1] = np.nan  # step 2 of episode 2


def empty(file: h5py.File) -> None:
    for key in list(file):
        tail = file[key].shape[1:]
        dtype = file[key].dtype
        del file[key]
        file.create_dataset(key, shape=(0, *tail), dtype=dtype)


def widen(file: h5py.File) -> None:
    for key in ("observations", "next_observations"):
        wider = np.pad(file[key][...], ((0, 0), (0, 1)))
        del file[key]
        file[key] = wider


DAMAGE: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "missing file": ("replay.hdf5", Path.unlink, ["replay.hdf5", "no such file"]),
    "cut short": ("replay.hdf5", cut_in_half, ["replay.hdf5", "cut short"]),
    "empty file": ("replay.hdf5", lambda path: path.write_bytes(b"") and None, ["replay.hdf5", "empty (0 bytes)"]),
    "web page": (
        "replay.hdf5",
        lambda path: path.write_text("<!DOCTYPE html><html>404</html>") and None,
        ["replay.hdf5", "web page"],
    ),
    "wrong key": ("replay.hdf5", edit(rename_actions), ["replay.hdf5", "'actions'"]),
    "lengths that do not match": ("replay.hdf5", edit(drop_last_action), ["replay.hdf5", "observations", "actions"]),
    "NaN": ("replay.hdf5", edit(spoil_an_observation), ["replay.hdf5", "observations", "episode 2, step 2"]),
    "no steps": ("replay.hdf5", edit(empty), ["replay.hdf5", "no steps"]),
    "demonstration of another width": ("expert.hdf5", edit(widen), ["expert.hdf5", "(4,)", "(3,)", "transport"]),
}


@pytest.fixture
def untouched(home: Home) -> Any:
    """The home folder; afterwards nothing in it has changed."""

    def state() -> dict[str, bytes]:
        files = (p for p in home.path.rglob("*") if p.is_file() and "locks" not in p.parts)
        return {str(p.relative_to(home.path)): p.read_bytes() for p in files}

    before = state()
    yield home.path
    assert state() == before


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message with which a command refuses, on standard error alone, with exit code 2."""
    assert _main([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error:") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_used_stops_the_study_before_any_work(
    damage: str, untouched: Path, write_study: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    name, apply, expected = DAMAGE[damage]
    apply(study.parent / name)
    message = refused(capsys, "run", study, "--home", untouched)
    for words in expected:
        assert words in message


SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown kind": ({"labelers": {"a": {"kind": "zeros"}}}, ["tiny.yaml, line", "'zeros'", "did you mean 'zero'?"]),
    "unknown key": ({"seed": [0]}, ["tiny.yaml, line", "'seed'", "did you mean 'seeds'?"]),
    "unknown environment": (
        {"datasets": {"replay": {"path": "replay.hdf5", "demonstrations": "expert", "environment": "Pendulm-v1"}}},
        ["Pendulm-v1"],
    ),
    "environment that does not fit": (
        {"datasets": {"replay": {"path": "replay.hdf5", "demonstrations": "expert", "environment": "CartPole-v1"}}},
        ["replay.hdf5", "CartPole-v1", "(4,)", "(3,)"],
    ),
    "unknown reference": (
        {
            "datasets": {
                "replay": {
                    "path": "replay.hdf5",
                    "demonstrations": "expert",
                    "environment": "Pendulum-v1",
                    "reference": "hopper-medum-v2",
                }
            }
        },
        ["hopper-medum-v2"],
    ),
    "demonstration that is not there": (
        {"labelers": {"a": {"kind": "optimal_transport", "demonstrations": {"episodes": [2]}}}},
        ["expert.hdf5", "episode 2", "0 to 1"],
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_cannot_be_used_stops_the_study_before_any_work(
    setting: str, untouched: Path, write_study: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = SETTINGS[setting]
    message = refused(capsys, "run", write_study(tmp_path / "study", **changes), "--home", untouched)
    for words in expected:
        assert words in message


def test_a_file_without_rewards_cannot_give_source_labels(
    untouched: Path, write_study: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    with h5py.File(study.parent / "replay.hdf5", "r+") as file:
        del file["rewards"]
    message = refused(capsys, "run", study, "--home", untouched)
    assert "replay.hdf5" in message and "'source'" in message and "rewards" in message


def test_the_same_as_a_process() -> None:
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "run", "nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip() == "error: nowhere.yaml: the study file cannot be read: No such file or directory."


def test_of_several_files_the_good_ones_are_stored(
    write_study: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "study").parent
    shutil.copy(folder / "replay.hdf5", folder / "cut.hdf5")
    cut_in_half(folder / "cut.hdf5")
    (folder / "page.hdf5").write_text("<html></html>")
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "ingest"]
    files = [str(folder / name) for name in ("replay.hdf5", "cut.hdf5", "page.hdf5")]
    home = tmp_path / "home"
    done = subprocess.run([*command, *files, "--home", str(home)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 2
    assert any("cut.hdf5" in line for line in lines) and any("page.hdf5" in line for line in lines)
    store = Home(home).store
    assert [dataset.name for dataset in store.datasets()] == ["replay"]
    assert store.datasets()[0].manifest.n_episodes == 12
    assert not list((store.root / "partial").iterdir())
    assert _main(["ingest", files[0], "--home", str(home)]) == 0  # nothing left to do
    assert store.datasets()[0].digest in capsys.readouterr().out
    assert _main(["ingest", files[1], "--home", str(home)]) == 2
