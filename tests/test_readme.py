"""What the README shows works as it stands there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.study import load_study

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_study_shown_is_one(tmp_path: Path, text: str) -> None:
    study = tmp_path / "mine.yaml"
    study.write_text(text, encoding="utf-8")
    assert load_study(study).labelers.keys() == {"zero", "optimal_transport"}


@pytest.mark.parametrize("text", blocks("python"))
def test_the_python_shown_runs(tmp_path: Path, text: str) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    ran = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "converged" in ran.stdout


def test_the_set_up_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^ {4}make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
