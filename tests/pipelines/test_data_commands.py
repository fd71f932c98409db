"""`assay data`: from a file to a stored dataset, parts of it, and files in other formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.ingest import ingest
from data.store import Store
from pipelines.cli import _main

WriteStudy = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def files(write_study: WriteStudy, tmp_path: Path) -> Path:
    """Folder of the little study's files."""
    return write_study(tmp_path / "study").parent


@pytest.fixture
def home(files: Path, tmp_path: Path) -> Path:
    """A home folder that holds the little study's datasets."""
    store = Store(tmp_path / "home" / "store")
    for name in ("replay", "expert"):
        ingest(files / f"{name}.hdf5", name, store)
    return tmp_path / "home"


def said(capsys: Capture, *arguments: object) -> Any:
    """What a command prints as JSON."""
    assert _main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_check_prints_what_scripts_and_people_need(files: Path, capsys: Capture) -> None:
    found = said(capsys, "data", "check", files / "replay.hdf5")
    assert found["format"] == "d4rl"
    assert found["episodes"] == 12
    assert found["observation"] == {"shape": [3], "dtype": "float32"}
    assert _main(["data", "check", str(files / "replay.hdf5")]) == 0
    assert f"d4rl, 12 episodes, {found['steps']} steps" in capsys.readouterr().out


def test_check_of_a_broken_file_prints_its_problems_and_fails(files: Path, capsys: Capture) -> None:
    path = files / "replay.hdf5"
    path.write_bytes(path.read_bytes()[:3000])
    assert _main(["data", "check", str(path), "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems[0]["severity"] == "error"
    assert "cut short" in problems[0]["message"]
    assert _main(["data", "check", str(path)]) == 2
    assert "replay.hdf5" in capsys.readouterr().out


def test_check_by_a_format_that_is_none_names_those_there_are(files: Path, capsys: Capture) -> None:
    assert _main(["data", "check", str(files / "replay.hdf5"), "--format", "rlds"]) == 2
    assert "Readers: " in (message := capsys.readouterr().err)
    assert "minari" in message


def test_show_says_what_is_stored_and_draws_it(home: Path, capsys: Capture, tmp_path: Path) -> None:
    found = said(capsys, "data", "show", "replay", "--home", home, "--plot", tmp_path / "replay.svg")
    assert found["dataset"]["n_episodes"] == 12
    assert [labels["labeler"] for labels in found["labels"]] == ["source"]
    assert (tmp_path / "replay.svg").read_text(encoding="utf-8").startswith("<svg xmlns=")
    assert _main(["data", "show", "replay", "--home", str(home)]) == 0
    text = capsys.readouterr().out
    assert "12 episodes" in text and "returns by label set" in text
    assert max(map(len, text.splitlines())) <= 100
    assert _main(["data", "show", "reply", "--home", str(home)]) == 2
    assert "it has: expert, replay" in capsys.readouterr().err


def test_merge_split_and_filter_make_new_datasets(home: Path, capsys: Capture) -> None:
    (merged,) = said(capsys, "data", "merge", "replay", "expert", "--name", "all", "--home", home)
    assert Store(home / "store").dataset("all", merged["dataset"]).manifest.n_episodes == 14
    parts = said(capsys, "data", "split", "all", "train=0.5", "test=0.5", "--seed", 1, "--home", home)
    assert [part["name"] for part in parts] == ["train", "test"]
    (best,) = said(capsys, "data", "filter", "train", "--name", "best", "--top", 3, "--home", home)
    assert Store(home / "store").dataset("best").manifest.n_episodes == 3
    assert best["source_labels"] is not None
    assert _main(["data", "split", "all", "train=half", "--home", str(home)]) == 2
    assert "train=0.9" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["d4rl", "minari", "lerobot"])
def test_export_is_read_back_as_the_same_dataset(home: Path, capsys: Capture, tmp_path: Path, format: str) -> None:
    path = tmp_path / ("out.hdf5" if format == "d4rl" else "out-v0")
    found = said(capsys, "data", "export", "replay", path, "--format", format, "--labels", "source", "--home", home)
    back = ingest(path, "back", Store(tmp_path / "other"))
    assert back.dataset == found["dataset"]
    assert back.source_labels is not None
    assert _main(["data", "export", "replay", str(path), "--format", format, "--home", str(home)]) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_export_refuses_what_is_not_there(home: Path, capsys: Capture, tmp_path: Path) -> None:
    for option, value, words in (
        ("--labels", "reward_model", "has no label set 'reward_model'; it has: source"),
        ("--format", "rlds", "Writers: d4rl, minari, lerobot"),
    ):
        assert _main(["data", "export", "replay", str(tmp_path / "out"), option, value, "--home", str(home)]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
