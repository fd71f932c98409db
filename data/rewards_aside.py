"""Rewards that arrive with episodes, set aside while these are stored, then stored as the label set `source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from data.digests import ColumnHasher
from data.labels import Labels, label_id
from data.progress import Progress
from data.readers.reader import Block
from data.store import Store, StoredDataset
from data.trajectories import Trajectories


class RewardsAside:
    """The rewards of a stream of blocks, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = ColumnHasher()
        self._n = 0
        self._finite = True

    def without(self, blocks: Iterator[Block], progress: Progress) -> Iterator[Block]:
        """The same blocks, once their rewards are set aside."""
        with self._path.open("wb") as file:
            for block in blocks:
                if block.rewards is not None:
                    self._n += len(block.rewards)
                    self._finite &= bool(np.isfinite(block.rewards).all())
                    self._hasher.update(block.rewards)
                    block.rewards.tofile(file)
                yield block
                progress(block.trajectories.n_steps)

    def store_labels(self, store: Store, dataset: StoredDataset, origin: Mapping[str, JsonValue]) -> str | None:
        """Store what was set aside as label set `source`; None if there are none, or any is not finite.

        origin: where the rewards came from, for the manifest. Returns the label set's id.
        """
        if self._n != dataset.manifest.n_steps or not self._finite:
            return None
        digest = self._hasher.digest()
        identity = label_id(dataset.digest, {"kind": "source"}, 1, digest)

        def make(shard: int, trajectories: Trajectories, steps: slice) -> Labels:
            return Labels(np.fromfile(self._path, np.float32, count=steps.stop - steps.start, offset=4 * steps.start))

        said: dict[str, JsonValue] = {"labeler": {"kind": "source"}, "evidence": {"digest": digest}, **origin}
        store.write_labels(dataset, identity, make, said)
        return identity
