"""Reading a file as ingestion does, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.findings import Finding
from data.readers.reader import Reader, Source
from data.readers.soundness import sound_blocks
from data.trajectories import Trajectories, concatenate


@dataclass
class Read:
    """What reading a file gave. source: closed."""

    trajectories: Trajectories
    rewards: np.ndarray | None
    findings: list[Finding]
    source: Source

    def finding(self, code: str) -> Finding:
        (found,) = [f for f in self.findings if f.code == code]
        return found

    @property
    def codes(self) -> set[str]:
        return {f.code for f in self.findings}


def read_path(reader: Reader, path: Path) -> Read:
    with reader.open(path) as source:
        blocks = list(sound_blocks(source, reader, path))
    rewards = [block.rewards for block in blocks if block.rewards is not None]
    return Read(
        trajectories=concatenate([block.trajectories for block in blocks]),
        rewards=np.concatenate(rewards) if rewards else None,
        findings=source.findings,
        source=source,
    )
