"""Ingestion: from a file in some format to a stored dataset, with the file's rewards as the label set `source`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import JsonValue

from data.config import Config
from data.digests import digest_of, digest_of_file
from data.findings import Finding
from data.progress import Progress, silent
from data.readers import recognise
from data.readers.ahead import ahead
from data.readers.reader import Reader
from data.readers.soundness import sound_blocks
from data.rewards_aside import RewardsAside
from data.store import Store


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
        with reader.open(path) as source, store.scratch("rewards") as scratch:
            rewards = RewardsAside(scratch / "rewards.raw")
            provenance: dict[str, JsonValue] = {
                "file": path.name,
                "file_digest": source_digest,
                "reader": reader.model_dump(mode="json"),
                "reader_version": reader.version,
                "metadata": dict(source.metadata),
            }
            blocks = rewards.without(ahead(sound_blocks(source, reader, path)), progress)
            dataset = store.write_dataset(name, blocks, provenance, source.findings)
            labels = rewards.store_labels(store, dataset, {"file_digest": source_digest})
        result = Ingested(name=name, dataset=dataset.digest, source_labels=labels, findings=tuple(source.findings))
        store.write_record(record, result)
    return result


def ingested(key: str, store: Store) -> Ingested | None:
    """What the ingestion with this key gave, if it was done and all that it gave is still there."""
    return _known(store, store.root / "ingests" / f"{key}.json")


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
