"""Ingestion: from a file in some format to a stored dataset, with the file's rewards as the label set `source`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pydantic

from data.config import Config
from data.digests import ColumnHasher, digest_of, digest_of_file
from data.findings import Finding, Severity
from data.labels import Labels, label_id
from data.readers import recognise
from data.readers.reader import Block, Reader, Source
from data.readers.soundness import sound_blocks
from data.store import Store, StoredDataset

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of steps just read; `Source.n_steps` says how many there are."""


def silent(done: int) -> None:
    """Progress nobody watches."""


class Ingested(Config):
    """What an ingestion gave. source_labels: id of the label set of the file's own rewards, None if it has none."""

    format: Literal["assay-ingest/1"] = "assay-ingest/1"
    name: str
    dataset: str
    source_labels: str | None
    findings: tuple[Finding, ...]


def ingest_key(path: Path, name: str, reader: Reader) -> str:
    """Identity of an ingestion: file content, reader, its settings and version, and the dataset's name."""
    return _key(digest_of_file(path), name, reader)


def ingest(path: Path, name: str, store: Store, reader: Reader | None = None, progress: Progress = silent) -> Ingested:
    """Read `path` into the store as dataset `name`, and its rewards as label set `source`.

    reader: None to recognise the format by content. Asked again for the same file content, reader and name, it
    returns what it gave before and does nothing; killed anywhere, the same call finishes the work.
    Raises DatasetError if the file is refused; the store is then as it was.
    """
    reader = reader or recognise(path)
    source_digest = digest_of_file(path)
    key = _key(source_digest, name, reader)
    record = store.root / "ingests" / f"{key}.json"
    with store.lock(f"ingest-{key}"):
        known = _known(store, record)
        if known:
            return known
        rewards: list[np.ndarray] = []
        with reader.open(path) as source:
            provenance = {
                "file": path.name,
                "file_digest": source_digest,
                "reader": reader.model_dump(mode="json"),
                "reader_version": reader.version,
                "metadata": dict(source.metadata),
            }
            blocks = _keep_rewards(sound_blocks(source, reader, path), source, rewards, progress)
            dataset = store.write_dataset(name, blocks, provenance, source.findings)
        labels = _store_source_labels(store, dataset, np.concatenate(rewards) if rewards else None, source_digest)
        result = Ingested(name=name, dataset=dataset.digest, source_labels=labels, findings=tuple(source.findings))
        store.write_record(record, result)
    return result


def _key(source_digest: str, name: str, reader: Reader) -> str:
    return digest_of(
        {"source": source_digest, "reader": reader.model_dump(mode="json"), "version": reader.version, "name": name}
    )


def _known(store: Store, record: Path) -> Ingested | None:
    """The record of an earlier ingestion, if all that it speaks of is still there."""
    try:
        known = Ingested.model_validate_json(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, pydantic.ValidationError):
        return None
    whole = store.has_dataset(known.name, known.dataset) and (
        known.source_labels is None or store.has_labels(known.dataset, known.source_labels)
    )
    return known if whole else None


def _keep_rewards(
    blocks: Iterator[Block], source: Source, rewards: list[np.ndarray], progress: Progress
) -> Iterator[Block]:
    """Pass blocks on and collect their rewards; none are kept if any is not finite, and a finding says so."""
    bad, first, episodes = 0, None, 0
    for block in blocks:
        if block.rewards is not None:
            wrong = np.flatnonzero(~np.isfinite(block.rewards))
            if len(wrong) and first is None:
                episode = int(block.trajectories.episode_index[wrong[0]])
                first = (episodes + episode, int(wrong[0] - block.trajectories.offsets[episode]))
            bad += len(wrong)
            rewards.append(block.rewards)
        episodes += block.trajectories.n_episodes
        progress(block.trajectories.n_steps)
        yield block
    if first is not None:
        rewards.clear()
        source.findings.append(
            Finding(
                code="rewards-not-finite",
                severity=Severity.WARNING,
                message=f"'rewards' is not finite at episode {first[0]}, step {first[1]} ({bad:,} places): the dataset "
                "is stored without `source` labels; other labelers are not affected.",
                episode=first[0],
                step=first[1],
                count=bad,
            )
        )


def _store_source_labels(
    store: Store, dataset: StoredDataset, rewards: np.ndarray | None, source_digest: str
) -> str | None:
    if rewards is None:
        return None
    hasher = ColumnHasher()
    hasher.update(rewards)
    identity = label_id(dataset.digest, {"kind": "source"}, 1, hasher.digest())
    origin = {"labeler": {"kind": "source"}, "rewards": hasher.digest(), "file_digest": source_digest}
    store.write_labels(dataset, identity, lambda shard, trajectories, steps: Labels(rewards[steps]), origin)
    return identity
