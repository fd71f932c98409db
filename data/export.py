"""Export: a stored dataset, with the rewards of any of its label sets, as a file in some format."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from data.errors import ConfigurationError
from data.findings import Finding
from data.progress import Progress, silent
from data.readers.reader import Block
from data.store import StoredDataset, StoredLabels, publish
from data.writers.writer import Contents, Writer


def export(
    dataset: StoredDataset,
    path: Path,
    writer: Writer,
    labels: StoredLabels | None = None,
    progress: Progress = silent,
) -> tuple[Finding, ...]:
    """Write `dataset`, with the rewards of `labels` if given, to `path`; a few episodes are in memory at a time.

    `path` appears whole or not at all. Ingested again it gives the same dataset and the same rewards.
    Returns what is to be said of the result. Raises ConfigurationError if something is at `path` already or the format
    cannot hold the dataset, StoreError if the labels are for another dataset or are no rewards.
    """
    _refuse_existing(path)
    contents = Contents(
        dataset=dataset.manifest,
        labels=None if labels is None else labels.id,
        labeler=None if labels is None else labels.labeler,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.mkdir()
    try:
        findings = writer.write(beside / path.name, contents, _told(dataset.blocks(labels), progress))
        _refuse_existing(path)
        publish(beside / path.name, path)
    finally:
        shutil.rmtree(beside)
    return tuple(findings)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigurationError(f"{path}: there is something of this name; it is not overwritten. Choose another.")


def _told(blocks: Iterator[Block], progress: Progress) -> Iterator[Block]:
    for block in blocks:
        yield block
        progress(block.trajectories.n_steps)
