from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipelines.home import Home, quieten

quieten()


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
