"""`assay data`: from a file to a stored dataset, parts of it, and files in other formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data.ingest import ingest
from data.labels import ActionLabels
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
    message = capsys.readouterr().err
    assert "there is no reader 'rlds'" in message and "minari" in message


def test_show_says_what_is_stored_and_draws_it(home: Path, capsys: Capture, tmp_path: Path) -> None:
    found = said(capsys, "data", "show", "replay", "--home", home, "--plot", tmp_path / "replay.svg")
    assert found["dataset"]["n_episodes"] == 12
    assert [labels["labeler"] for labels in found["labels"]] == ["source"]
    assert (tmp_path / "replay.svg").read_text(encoding="utf-8").startswith("<svg xmlns=")
    assert _main(["data", "show", "replay", "--home", str(home)]) == 0
    text = capsys.readouterr().out
    assert "12 episodes" in text and "returns by label set" in text and "from replay.hdf5, read as d4rl" in text
    assert max(map(len, text.splitlines())) <= 100
    assert _main(["data", "show", "reply", "--home", str(home)]) == 2
    assert "it has: expert, replay" in capsys.readouterr().err


def test_show_of_a_file_says_the_same_and_keeps_nothing(home: Path, files: Path, capsys: Capture) -> None:
    stored = said(capsys, "data", "show", "replay", "--home", home)
    before = sorted(home.rglob("*"))
    shown = said(capsys, "data", "show", files / "replay.hdf5", "--home", home)
    assert shown["labels"] == stored["labels"] and shown["dataset"]["digest"] == stored["dataset"]["digest"]
    assert sorted(home.rglob("*")) == before
    (files / "replay.hdf5").write_text("<!DOCTYPE html>")
    assert _main(["data", "show", str(files / "replay.hdf5"), "--home", str(home)]) == 2
    assert "replay.hdf5: not a dataset; it looks like a web page" in capsys.readouterr().err


def test_show_prints_finding_codes_and_label_sets_that_are_actions(
    write_hdf5: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    ends = np.arange(4) == 3
    path = write_hdf5("odd.hdf5", observations=np.eye(4), actions=np.eye(4, dtype="f4"), terminals=ends, timeouts=ends)
    store = Store(tmp_path / "store")
    dataset = store.dataset("odd", ingest(path, "odd", store).dataset)
    guess = np.asarray(dataset.trajectories().actions) + 1
    origin = {"labeler": {"kind": "guess"}}
    store.write_labels(dataset, "0" * 64, lambda index, shard, steps: ActionLabels(guess[steps]), origin)
    found = said(capsys, "data", "show", "odd", "--home", tmp_path)
    assert [(labels["labeler"], labels["column"], labels["returns"]) for labels in found["labels"]] == [
        ("guess", "actions", None)
    ]
    assert _main(["data", "show", "odd", "--home", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "[converted]" in text and re.search(r"guess +0{12} +actions", text)


def test_a_picture_is_an_svg_that_replaces_nothing(home: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "there.svg").write_text("precious")
    for name, words in (("replay.png", "ends in .svg"), ("there.svg", "not overwritten")):
        assert _main(["data", "show", "replay", "--home", str(home), "--plot", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "there.svg").read_text() == "precious" and not (tmp_path / "replay.png").exists()


def test_datasets_of_one_name_are_told_apart_by_digest(home: Path, files: Path, capsys: Capture) -> None:
    store = Store(home / "store")
    first, second = store.dataset("replay").digest, ingest(files / "expert.hdf5", "replay", store).dataset
    assert _main(["data", "filter", "replay", "--shortest", "1", "--name", "x", "--home", str(home)]) == 2
    message = capsys.readouterr().err
    assert f"replay@{first}" in message and f"replay@{second}" in message
    said(capsys, "data", "filter", f"replay@{second[:8]}", "--shortest", 1, "--name", "x", "--home", home)
    assert store.dataset("x").digest == second


def test_which_of_several_rewards_go_along_is_not_guessed(home: Path, files: Path, capsys: Capture) -> None:
    with h5py.File(files / "expert.hdf5", "r+") as file:
        file["rewards"][0] += 1
    ingest(files / "expert.hdf5", "expert", Store(home / "store"))
    assert _main(["data", "merge", "replay", "expert", "--name", "all", "--home", str(home)]) == 2
    assert "'expert' has 2 label sets 'source'" in capsys.readouterr().err


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
        ("--format", "rlds", "There is: d4rl, minari, lerobot"),
    ):
        assert _main(["data", "export", "replay", str(tmp_path / "out"), option, value, "--home", str(home)]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
