"""Checking a source: what is in it, and everything to be said of it, without changing or storing anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from data.errors import DatasetError
from data.findings import Finding, Severity
from data.progress import Progress, silent
from data.readers import recognise
from data.readers.ahead import ahead
from data.readers.reader import Reader, RefusedError, Source, Space
from data.readers.soundness import sound_blocks
from data.trajectories import Trajectories


@dataclass(frozen=True)
class Check:
    """What a check found.

    format: the reader's kind, None if no format was recognised. counts: None if the source is refused. observation:
    as in `Source`. action: None, like observation, if the source could not be opened. discrete: whether actions are
    choices, None if no episode could be read. reward_sum: of all rewards as float32, summed in float64; None if there
    are none, or any is not finite. problems: all findings, the harmless notes among them.
    """

    format: str | None
    counts: Counts | None
    observation: Space | Mapping[str, Space] | None
    action: Space | None
    discrete: bool | None
    reward_sum: float | None
    problems: tuple[Finding, ...]

    @property
    def refused(self) -> bool:
        """Whether the source cannot be ingested."""
        return any(problem.severity is Severity.ERROR for problem in self.problems)

    def to_json(self) -> dict[str, JsonValue]:
        """For scripts; what is not known is null."""
        counts = {name: None if self.counts is None else getattr(self.counts, name) for name in COUNTS}
        observation: JsonValue = None
        if isinstance(self.observation, Space):
            observation = self.observation.model_dump(mode="json")
        elif self.observation is not None:
            observation = {key: space.model_dump(mode="json") for key, space in self.observation.items()}
        action = None if self.action is None else self.action.model_dump(mode="json") | {"discrete": self.discrete}
        said = {"code", "severity", "episode", "message"}
        return {
            "format": self.format,
            **counts,
            "observation": observation,
            "action": action,
            "reward_sum": self.reward_sum,
            "problems": [problem.model_dump(mode="json", include=said) for problem in self.problems],
        }


COUNTS = ("episodes", "steps", "terminated", "truncated")


@dataclass
class Counts:
    """What there is to ingest. An episode that is both terminated and truncated counts in both."""

    episodes: int = 0
    steps: int = 0
    terminated: int = 0
    truncated: int = 0

    def add(self, trajectories: Trajectories) -> None:
        """Count some more episodes."""
        self.episodes += trajectories.n_episodes
        self.steps += trajectories.n_steps
        self.terminated += int(trajectories.terminated.sum())
        self.truncated += int(trajectories.truncated.sum())


def check(path: Path, reader: Reader | None = None, progress: Progress = silent) -> Check:
    """Read all of `path` as ingestion would, and say what was found; a source that is refused raises nothing.

    reader: None to recognise the format by content. A few episodes are in memory at a time.
    """
    source: Source | None = None
    counts, reward_sum, discrete = Counts(), None, None
    findings: Sequence[Finding]
    try:
        reader = reader or recognise(path)
        with reader.open(path) as source:
            for block in ahead(sound_blocks(source, reader, path)):
                counts.add(block.trajectories)
                discrete = block.trajectories.discrete
                if block.rewards is not None:
                    with np.errstate(invalid="ignore"):  # infinities of both signs, which the findings tell of
                        reward_sum = (reward_sum or 0.0) + float(block.rewards.sum(dtype=np.float64))
                progress(block.trajectories.n_steps)
        findings = source.findings
    except RefusedError as error:
        findings = error.findings
    except DatasetError as error:
        unreadable = Finding(code="unreadable", severity=Severity.ERROR, message=str(error))
        findings = [*(source.findings if source else []), unreadable]
    refused = any(finding.severity is Severity.ERROR for finding in findings)
    known = reward_sum is not None and math.isfinite(reward_sum) and not refused
    return Check(
        format=None if reader is None else reader.kind,
        counts=None if refused else counts,
        observation=None if source is None else source.observation,
        action=None if source is None else source.action,
        discrete=discrete,
        reward_sum=reward_sum if known else None,
        problems=tuple(findings),
    )
