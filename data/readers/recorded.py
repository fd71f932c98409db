"""From episodes read one at a time to blocks of some of them, for formats that keep each episode apart.

What such formats leave open is decided here, and said: an episode that no flag ends is kept as truncated; flags before
its last step do not cut it; the observation after the last step may not have been recorded; an episode without steps
is left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from pydantic import JsonValue

from data.errors import DatasetError
from data.findings import Finding, Severity
from data.readers.actions import ActionKind, action_kind
from data.readers.observations import KeyedReader, Observations, choose_observations
from data.readers.reader import Block, Reader, RefusedError, Space
from data.trajectories import Trajectories, concatenate

BLOCK_BYTES = 8 << 20
"""A block has about so many bytes, or is one longer episode."""

PLACES = 5
"""So many episodes of a kind are named; the rest is counted."""


class MarkedReader(KeyedReader):
    """Settings of formats that mark where an episode ended, but not whether the task ended there.

    ends: what such a mark means; without any marks in the source, what the end of each of its episodes means. An
        episode without a mark at its end, while others have one, is truncated.
    """

    ends: Literal["truncated", "terminated"] = "truncated"

    def flags(self, marks: np.ndarray | None, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Terminations and truncations [T], from marks [T] or from none in the source."""
        if marks is None:
            marks = np.arange(n_steps) == n_steps - 1
        none = np.zeros(n_steps, bool)
        return (marks, none) if self.ends == "terminated" else (none, marks)

    def said(self, marks: str | None) -> Finding:
        """What was decided about ends. marks: the source's name for them, None if it has none."""
        found = f"that an episode ended is marked ({marks}), not how" if marks else "nothing marks how episodes ended"
        if self.ends == "truncated":
            message = f"{found}: taken as truncated. If the task ended there, say ends: terminated."
        else:
            message = f"{found}: taken as terminated, as asked."
        return Finding(code="ends-taken", severity=Severity.NOTE, message=message)


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode as its source has it.

    name: as the source calls it (`demo_3`). observations: one array for each key that is read, [T + 1, ...], or
    [T, ...] if the observation after the last step was not recorded. actions: [T, ...]. rewards: [T], or None if the
    source has none (then no episode has any). terminations, truncations: [T] flags, 0 or 1. marks: what the source
    calls the one column that both are made of, if it has no two.
    """

    name: str
    observations: dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray | None
    terminations: np.ndarray
    truncations: np.ndarray
    marks: str | None = None


class RecordedSource(ABC):
    """Base of opened sources that keep each episode apart; see `Source` for the attributes."""

    format: str
    n_steps: int | None
    observation: Space | Mapping[str, Space]
    action: Space
    metadata: Mapping[str, JsonValue]

    def __init__(self, path: Path) -> None:
        self._path = path
        self.findings: list[Finding] = []
        self._observations: Observations
        self._kind: ActionKind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def _episodes(self) -> Iterator[Episode]:
        """All episodes, in order."""

    @abstractmethod
    def _actions(self) -> Iterator[np.ndarray]:
        """The actions of all episodes, in order."""

    def blocks(self) -> Iterator[Block]:
        """All episodes, a few at a time."""
        return Packer(self._observations, self._kind, self._path, self.findings).blocks(self._episodes())

    def _understand_observations(self, spaces: Space | Mapping[str, Space], chosen: tuple[str, ...] | None) -> None:
        self._observations = choose_observations(self._path, spaces, chosen, self.findings)
        self.observation = (
            spaces if isinstance(spaces, Space) else {key: spaces[key] for key in self._observations.keys}
        )

    def _understand_actions(
        self,
        settings: Reader,
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        declared: int | tuple[int, ...] | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Decide what actions are. shape, dtype: of one in the source. declared, bounds: what the source says."""
        if 0 in shape:
            raise self._refuse("actions-shape", f"'actions' have rows of shape {shape}: no numbers.")
        declared = declared if settings.n_actions is None else settings.n_actions
        bounds = bounds if settings.action_bounds is None else settings.action_bounds
        highest = None
        if declared is None and dtype.kind in "iub":
            tops = [np.atleast_1d(actions.max(0)) for actions in self._actions() if len(actions)]
            if unlike := [top.shape for top in tops if top.shape != tops[0].shape]:
                message = f"'actions' have rows of shape {tops[0].shape} in one episode and {unlike[0]} in another."
                raise self._refuse("actions-shape", message)
            highest = tuple(int(h) for h in np.max(tops, 0)) if tops else (0,) * math.prod(shape)
        self._kind = action_kind(self._path, shape, dtype, declared, bounds, highest, self.findings)
        self.action = Space(shape=self._kind.shape, dtype=dtype.name)

    def _note(self, code: str, message: str, severity: Severity = Severity.NOTE, count: int = 1) -> None:
        self.findings.append(Finding(code=code, severity=severity, message=message, count=count))

    def _refuse(self, code: str, message: str) -> RefusedError:
        self._note(code, message, Severity.ERROR)
        return RefusedError(self._path, self.findings)


@dataclass
class _Named:
    """Episodes of which something is said: the first few by index, name and last step, and how many there are."""

    first: list[tuple[int, str, int]] = field(default_factory=list)
    count: int = 0

    def add(self, index: int, name: str, step: int) -> None:
        if len(self.first) < PLACES:
            self.first.append((index, name, step))
        self.count += 1

    def text(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return ", ".join(name for _, name, _ in self.first) + more


class Packer:
    """Delivers episodes in blocks, and adds what it noticed to `findings` at the end."""

    def __init__(self, observations: Observations, kind: ActionKind, path: Path, findings: list[Finding]) -> None:
        self._observations, self._kind, self._path, self._findings = observations, kind, path, findings
        self._n_episodes = self._n_steps = 0
        self._converted: dict[str, np.dtype[np.generic]] = {}  # the source's dtypes of what was converted
        self._empty, self._inside, self._unfinished = _Named(), _Named(), _Named()
        self._unknown, self._not_needed = _Named(), _Named()

    def blocks(self, episodes: Iterator[Episode]) -> Iterator[Block]:
        """All episodes with steps, in order.

        Raises DatasetError, naming the episode, where its arrays do not fit together.
        """
        parts: list[Block] = []
        size = 0
        for episode in episodes:
            if not len(episode.actions):
                self._empty.add(self._n_episodes, episode.name, 0)
                continue
            parts.append(self._deliver(episode))
            size += sum(rows.nbytes for rows in episode.observations.values()) + episode.actions.nbytes
            if size >= BLOCK_BYTES:
                yield _joined(parts)
                parts, size = [], 0
        if parts:
            yield _joined(parts)
        self._report()

    def _deliver(self, episode: Episode) -> Block:
        n = len(episode.actions)
        rows = self._observations.deliver(episode.observations, episode.name)
        if len(rows) not in (n, n + 1):
            raise self._wrong(episode, f"{len(rows):,} observations but {n:,} actions; expected as many, or one more")
        final_observed = len(rows) == n + 1
        terminations, truncations = (self._flags(episode, key) for key in ("terminations", "truncations"))
        terminated, truncated = bool(terminations[-1]), bool(truncations[-1])
        inside = bool((terminations | truncations)[:-1].any())
        self._notice(episode.name, n, final_observed, terminated, truncated, inside)
        trajectories = Trajectories(
            observations=rows if final_observed else np.concatenate([rows, rows[-1:]]),
            actions=self._actions(episode),
            offsets=np.array([0, n], np.int64),
            terminated=np.array([terminated]),
            truncated=np.array([truncated or not terminated]),
            final_observed=np.array([final_observed]),
            n_actions=self._kind.n_actions,
            action_bounds=self._kind.bounds,
        )
        block = Block(trajectories, self._rewards(episode))
        self._n_episodes += 1
        self._n_steps += n
        return block

    def _actions(self, episode: Episode) -> np.ndarray:
        actions = episode.actions
        if actions.dtype.kind not in "fiub" or actions.size != len(actions) * math.prod(self._kind.shape):
            expected = f"expected numbers of shape {self._kind.shape}, as declared or as in the first episode"
            raise self._wrong(episode, f"'actions' have rows of {actions.dtype} {actions.shape[1:]}; {expected}")
        if actions.dtype != self._kind.dtype:
            self._converted.setdefault("actions", actions.dtype)
        return self._kind.deliver(actions, self._n_steps)

    def _rewards(self, episode: Episode) -> np.ndarray | None:
        if episode.rewards is None:
            return None
        rewards = self._column(episode, "rewards")
        if rewards.dtype != np.float32:
            self._converted.setdefault("rewards", rewards.dtype)
        with np.errstate(over="ignore"):
            return rewards.astype(np.float32, copy=False)

    def _flags(self, episode: Episode, key: str) -> np.ndarray:
        values = self._column(episode, key)
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            name = episode.marks or key
            raise self._wrong(episode, f"'{name}' is {values[wrong[0]]} at step {wrong[0]:,}: flags are 0 or 1")
        flags: np.ndarray = values == 1
        return flags

    def _column(self, episode: Episode, key: str) -> np.ndarray:
        values: np.ndarray = getattr(episode, key)
        n = len(episode.actions)
        if values.shape not in ((n,), (n, 1)) or values.dtype.kind not in "fiub":
            name = key if key == "rewards" else episode.marks or key
            expected = f"expected numbers of shape ({n},), one for each action"
            raise self._wrong(episode, f"'{name}' is {values.dtype} of shape {values.shape}; {expected}")
        return values.reshape(n)

    def _wrong(self, episode: Episode, message: str) -> DatasetError:
        return DatasetError(f"{self._path.name}: {episode.name}: {message}.")

    # ------------------------------------------------------------ findings

    def _notice(
        self, name: str, n_steps: int, final_observed: bool, terminated: bool, truncated: bool, inside: bool
    ) -> None:
        place = (self._n_episodes, name, n_steps - 1)
        if inside:
            self._inside.add(*place)
        if not (terminated or truncated):
            self._unfinished.add(*place)
        if not final_observed:
            (self._not_needed if terminated else self._unknown).add(*place)

    def _report(self) -> None:
        for key, dtype in self._converted.items():
            to = self._kind.dtype.name if key == "actions" else "float32"
            message = f"'{key}': {dtype.name} converted to {to}."
            self._findings.append(Finding(code="converted", severity=Severity.NOTE, message=message))
        warning, note = Severity.WARNING, Severity.NOTE
        self._say("empty-episodes", warning, "episodes without steps, left out", self._empty)
        self._say(
            "flags-inside",
            warning,
            "episodes with a flag before their last step, which go on after it and are not cut there",
            self._inside,
        )
        self._say(
            "unfinished-episodes", note, "episodes without a flag at their end, kept as truncated", self._unfinished
        )
        self._say(
            "final-observation-unknown",
            warning,
            "truncated episodes whose observation after the last step was not recorded (that step is kept and "
            "labelled, and never bootstrapped from)",
            self._unknown,
        )
        self._say(
            "final-observation-not-needed",
            note,
            "terminated episodes whose observation after the last step was not recorded (the value there is 0)",
            self._not_needed,
        )

    def _say(self, code: str, severity: Severity, what: str, episodes: _Named) -> None:
        if episodes.count:
            index, _, step = episodes.first[0]
            message = f"{what}: {episodes.count:,} ({episodes.text()})."
            self._findings.append(
                Finding(code=code, severity=severity, message=message, episode=index, step=step, count=episodes.count)
            )


def _joined(parts: list[Block]) -> Block:
    rewards = [part.rewards for part in parts if part.rewards is not None]
    return Block(concatenate([part.trajectories for part in parts]), np.concatenate(rewards) if rewards else None)
