"""The home folder: everything that a run writes, and the environment that other libraries read when imported.

<home>/store/         datasets, label sets, runs: see data/store.py
<home>/checkpoints/   unfinished training
<home>/studies/       what each finished study came to
<home>/reports/       one HTML page a study
<home>/tracking.db, artifacts/    MLflow, unless MLFLOW_TRACKING_URI or the study names another
<home>/prefect/       Prefect's own state, unless PREFECT_API_URL, PREFECT_PROFILE or PREFECT_HOME is set
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.store import Store

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_COLORS": "false",
    # Prefect gives its own server 20 seconds to start, which a busy machine does not keep.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Spinning OpenMP threads cost forty times the work itself as soon as another process wants a core.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def quieten() -> None:
    """Telemetry off, logs quiet, threads that wait without spinning. Call before torch, prefect or mlflow is imported.

    What the user has set stays.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Home:
    """A home folder; nothing is created before something is written."""

    path: Path

    @property
    def store(self) -> Store:
        """Datasets, label sets and runs."""
        from data.store import Store

        return Store(self.path / "store")

    @property
    def checkpoints(self) -> Path:
        """Unfinished training."""
        return self.path / "checkpoints"

    @property
    def studies(self) -> Path:
        """Results of finished studies."""
        return self.path / "studies"

    @property
    def database(self) -> Path:
        """MLflow's own database."""
        return self.path / "tracking.db"

    @property
    def artifacts(self) -> Path:
        """Artifacts of runs tracked in `database`."""
        return self.path / "artifacts"

    def report(self, study: str) -> Path:
        """The HTML page of a study."""
        return self.path / "reports" / f"{study}.html"

    def settle_prefect(self) -> None:
        """Keep Prefect's state in this folder, unless the user has settled on a server or a place."""
        if not any(name in os.environ for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_HOME")):
            place = self.path.resolve() / "prefect"
            place.mkdir(parents=True, exist_ok=True)
            os.environ["PREFECT_HOME"] = str(place)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold `key` against other processes; a second one waits. Ends with the process, however it ends."""
        folder = self.path / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def write_whole(path: Path, text: str) -> None:
    """Put a small file in place at once: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
