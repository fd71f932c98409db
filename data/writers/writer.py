"""What a writer is: a configuration that writes a stream of whole episodes as a file, or folder, of one format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.config import Config
from data.findings import Finding
from data.readers.reader import Block
from data.store import DatasetManifest


@dataclass(frozen=True)
class Contents:
    """What is written, beside the episodes themselves.

    dataset: manifest of the dataset. labels: id of the label set whose rewards go along, None for none. labeler: what
    made these labels.
    """

    dataset: DatasetManifest
    labels: str | None
    labeler: str | None

    @property
    def provenance(self) -> dict[str, str]:
        """Where the file came from, for its own metadata: names and values."""
        said = {"assay_dataset": self.dataset.name, "assay_digest": self.dataset.digest}
        if self.labels is not None and self.labeler is not None:
            said |= {"assay_labels": self.labels, "assay_labeler": self.labeler}
        return said


class Writer(Config):
    """Base of every writer's configuration; a subclass adds `kind`.

    What a writer writes, the reader of the same kind reads back as the same dataset (equal digest) and the same
    rewards, bit for bit; what the format has no place for lies where other programs pass it over.
    """

    kind: str

    @abstractmethod
    def write(self, path: Path, contents: Contents, blocks: Iterable[Block]) -> list[Finding]:
        """Write all of `blocks` to `path`, which does not exist and whose name is the final one.

        blocks: whole episodes in order, with rewards if `contents.labels` is not None. Returns what is to be said of
        the result. Raises ConfigurationError where the format cannot hold the dataset.
        """
