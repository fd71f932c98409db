"""The doctor: what assay needs, looked at one by one."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from rich.table import Table

from data.config import Config
from data.errors import AssayError
from pipelines.home import Home

PACKAGES = ("numpy", "torch", "h5py", "pyarrow", "polars", "pydantic", "POT", "gymnasium", "prefect", "mlflow")


class Examined(Config):
    """One thing that was looked at. status: fail stops work, warn does not."""

    what: str
    status: Literal["ok", "warn", "fail"]
    found: str


def examine(home: Home) -> list[Examined]:
    """Look at everything; nothing is changed but a file made and removed to see whether the home folder takes one."""
    looks: tuple[Callable[[], Iterator[Examined]], ...] = (
        _python,
        _packages,
        _torch,
        _environments,
        lambda: _home(home),
        lambda: _store(home),
    )
    return [found for look in looks for found in look()]


def _python() -> Iterator[Examined]:
    right = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield Examined(what="python", status="ok" if right else "fail", found=found)


def _packages() -> Iterator[Examined]:
    for name in PACKAGES:
        try:
            yield Examined(what=name, status="ok", found=version(name))
        except PackageNotFoundError:
            yield Examined(what=name, status="fail", found="not installed: pip install assay")


def _torch() -> Iterator[Examined]:
    import torch

    if torch.cuda.is_available():
        yield Examined(what="device", status="ok", found=f"cuda: {torch.cuda.get_device_name()}")
    else:
        yield Examined(what="device", status="ok", found=f"cpu, {torch.get_num_threads()} threads; no CUDA device")
    waiting = os.environ.get("OMP_WAIT_POLICY", "not set")
    passive = waiting.upper() == "PASSIVE"
    found = waiting if passive else f"{waiting}: training keeps to one thread unless it is PASSIVE"
    yield Examined(what="OMP_WAIT_POLICY", status="ok" if passive else "warn", found=found)


def _environments() -> Iterator[Examined]:
    from algorithms.evaluation import spaces_of

    try:
        observation, action, _ = spaces_of("Hopper-v5")
        yield Examined(what="Hopper-v5", status="ok", found=f"observations {observation}, actions {action}")
    except AssayError as error:
        yield Examined(what="Hopper-v5", status="warn", found=str(error))


def _home(home: Home) -> Iterator[Examined]:
    place = home.path if home.path.exists() else home.path.resolve().parent
    writable = os.access(place, os.W_OK)
    found = str(home.path.resolve()) if writable else f"{place} cannot be written to: name another with --home"
    yield Examined(what="home", status="ok" if writable else "fail", found=found)


def _store(home: Home) -> Iterator[Examined]:
    """Every dataset is read and its digest compared, every label set is opened."""
    from pipelines.inventory import of_store

    try:
        held = of_store(home.store)
        for dataset in held.datasets:
            digest = home.store.dataset(dataset.name, dataset.digest).trajectories().digest()
            right = digest == dataset.digest
            found = "as its digest says" if right else f"its content has digest {digest}: delete and ingest it again"
            yield Examined(what=f"dataset {dataset.name}", status="ok" if right else "fail", found=found)
        n_labels = sum(len(dataset.labels) for dataset in held.datasets)
        found = f"{len(held.datasets)} datasets, {n_labels} label sets, {held.n_runs} runs"
        yield Examined(what="store", status="ok", found=found)
    except AssayError as error:
        yield Examined(what="store", status="fail", found=str(error))


def table(findings: list[Examined]) -> Table:
    """What was found, for people."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    shown.add_column("status", no_wrap=True)
    shown.add_column("what", no_wrap=True)
    shown.add_column("found", overflow="fold")
    for finding in findings:
        style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.status]
        shown.add_row(f"[{style}]{finding.status}[/]", finding.what, finding.found)
    return shown
