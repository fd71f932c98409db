"""Flat rows, one a step, with flags: where episodes begin and end, and which observation follows their last step.

The rules, in this order; each decision is a finding.

1. A row with `terminals` or `timeouts` ends an episode: terminated, truncated, or both.
2. If `next_observations` are there, each is compared with the observation of the following row. Where it differs in
   most of the columns that moved in that step, the recording was cut (a *jump*). Where it differs in few of them, the
   episode went on and something else was changed (a new goal): counted, and the following row is believed.
3. A jump without a flag ends an episode too, as truncated. But if flags are set where the recording goes on while it
   jumps elsewhere (flags a row late or early), the two contradict each other and the file is refused:
   `timeouts: ignore` cuts at jumps alone, `timeouts: trust` at flags alone. Without `next_observations` the same is
   seen, less surely, by steps far longer than others.
4. Without `timeouts` (the first generation of D4RL), episodes end at terminals, at jumps, and after
   `max_episode_steps` if given. If neither jumps nor a given length can tell, and the last row is no terminal, the
   file is refused and the rule asked for.
5. `terminals` that go on (mazes: every step near the goal) are cut by `goals`: at `every_flag` (the default: nothing
   is dropped; episodes of one step arise and are counted), at the `first` of each recording, dropping the steps after
   it, or not at all (`whole` recordings, ended by timeouts and jumps).
6. The last episode, if no flag ends it, is kept as truncated. Its last observation is that of the last
   `next_observations` row; if that is not known it is the observation of the last row, whose step is dropped.

The observation after an episode's last step is its own last `next_observations` row. It is not known without
`next_observations`; where the row is all zeros or NaN, or repeats the step's own observation though the episode was
moving; and where it is the first observation of the following episode and no row of the file shows a jump
(`next_observations` made by shifting). The step is then kept, and if the episode was truncated never bootstrapped from.
A source that says itself where next observations were recorded (`next_observed`) is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from data.findings import Finding
from data.readers.actions import ActionKind
from data.readers.ahead import ahead
from data.readers.continuity import compare, long_steps
from data.readers.decisions import Decisions
from data.readers.episodes import EpisodeAssembler
from data.readers.reader import Block, Reader


class FlatReader(Reader):
    """Settings of formats made of flat rows with flags; the rules are in this module's docstring.

    max_episode_steps: cut after so many steps; used where there are no `timeouts`.
    timeouts: `check` flags against observations, `trust` the flags alone, or `ignore` them.
    goals: where to cut rows with `terminals` that go on.
    """

    max_episode_steps: int | None = Field(default=None, ge=1)
    timeouts: Literal["check", "trust", "ignore"] = "check"
    goals: Literal["every_flag", "first", "whole"] = "every_flag"


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows in their delivered dtypes.

    observations, next_observations: [n, ...], the latter None if the source has none. actions: [n, ...].
    rewards: [n] float32 or None. terminals, timeouts: [n] bool; timeouts None if the source has none. next_observed:
    [n] bool, whether the next observation was recorded, None if the source does not say.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray | None
    terminals: np.ndarray
    timeouts: np.ndarray | None
    next_observations: np.ndarray | None
    next_observed: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.terminals)

    def __getitem__(self, rows: slice | np.ndarray) -> Rows:
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})


class Cutter:
    """Cuts a stream of rows into episodes by the rules of this module, and adds what it decided to `findings`."""

    def __init__(self, settings: FlatReader, kind: ActionKind, path: Path, findings: list[Finding]) -> None:
        self._settings = settings
        self._assembler = EpisodeAssembler(kind)
        self._decisions = Decisions(path, findings)
        self._own = False  # whether any row jumps: then next_observations are each episode's own
        self._since = 0  # steps since the last cut, for max_episode_steps
        self._reached = False  # whether the open recording has had its goal, for goals: first
        self._moving = False  # whether the row before this part moved

    def blocks(self, parts: Callable[[], Iterator[Rows]]) -> Iterator[Block]:
        """Whole episodes of the rows that `parts` gives, each time anew from the first row, in order.

        Raises RefusedError where no rule can tell their ends.
        """
        self._own = any(
            part.next_observations is not None and compare(part.observations, part.next_observations, after)[0].any()
            for part, after in _with_following(parts())
        )
        for part, after in _with_following(ahead(parts())):
            yield from self._cut(part, after)
        self._decisions.report(self._settings.timeouts, self._settings.goals, self._settings.max_episode_steps)

    def _cut(self, part: Rows, after: np.ndarray) -> Iterator[Block]:
        """The episodes that end in `part`. after: the following observations; none for the last row of the file."""
        n = len(part)
        timeouts = part.timeouts
        if timeouts is None or self._settings.timeouts == "ignore":
            timeouts = np.zeros(n, bool)
        flagged = part.terminals | timeouts
        if part.next_observations is None:
            jump = np.zeros(n, bool)
        else:
            jump, changed = compare(part.observations, part.next_observations, after)
            self._decisions.saw_jumps(part.terminals, timeouts, jump, changed, len(after))
        boundary = timeouts | (jump & part.terminals if self._settings.timeouts == "trust" else jump)
        if part.timeouts is None or self._settings.timeouts == "ignore":
            boundary |= self._limit(boundary | part.terminals if self._settings.goals == "every_flag" else boundary)
        end, keep = self._goals(part.terminals, boundary)
        if part.next_observations is None:
            long = long_steps(part.observations, after, flagged)
            self._decisions.saw_steps(part.terminals, timeouts, end, long)
        self._decisions.saw_rows(part.terminals, jump, part.timeouts is not None, part.next_observations is not None)
        followed = np.arange(n) < len(after)
        finals, observed = self._finals(part, np.flatnonzero(end), followed & ~jump)
        yield from self._assemble(part, timeouts, end, keep, finals, observed, last=not followed[-1])

    # ------------------------------------------------------------ where

    def _limit(self, end: np.ndarray) -> np.ndarray:
        """[n] bool, rows that are the last of `max_episode_steps` since the last end."""
        limit = self._settings.max_episode_steps
        cut = np.zeros(len(end), bool)
        if limit is None:
            return cut
        ends = np.flatnonzero(end)
        starts = np.concatenate([[-self._since], ends + 1])
        stops = np.concatenate([ends + 1, [len(end)]])
        for start, stop in zip(starts, stops, strict=True):
            cut[start + limit - 1 : stop : limit] = True
        both = np.flatnonzero(end | cut)
        self._since = len(end) - 1 - int(both[-1]) if len(both) else self._since + len(end)
        return cut

    def _goals(self, terminals: np.ndarray, boundary: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n] bool each: rows that end an episode, and rows that are kept (rule 5). boundary: ends of recordings."""
        if self._settings.goals == "every_flag":
            return terminals | boundary, np.ones(len(terminals), bool)
        if self._settings.goals == "whole":
            return boundary, np.ones(len(terminals), bool)
        recording = np.cumsum(boundary) - boundary
        starts = np.concatenate([[0], np.flatnonzero(boundary) + 1])
        goals = np.concatenate([[0], np.cumsum(terminals)])
        reached = goals[:-1] - goals[starts][recording] > 0
        reached |= self._reached & (recording == 0)
        self._reached = bool(not boundary[-1] and (reached[-1] or terminals[-1]))
        self._decisions.n_dropped += int(reached.sum())
        return ~reached & (terminals | boundary), ~reached

    # ------------------------------------------------------------ what follows, and the episodes

    def _finals(self, part: Rows, ends: np.ndarray, going_on: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[E, ...] the observation after each end, and [E] bool whether it is the episode's own.

        going_on: [n] bool, rows whose next observation is that of the following row.
        """
        truncated = ~part.terminals[ends]
        if part.next_observations is None:
            self._decisions.unknown_because["missing"] += int(truncated.sum())
            return part.observations[ends], np.zeros(len(ends), bool)
        if part.next_observed is not None:
            observed = part.next_observed[ends]
            self._decisions.unknown_because["unrecorded"] += int((~observed & truncated).sum())
            return part.next_observations[ends], observed
        repeated = self._repeated(part, part.next_observations, ends)
        following = going_on[ends] & ~repeated & (not self._own)
        self._decisions.unknown_because["repeated"] += int((repeated & truncated).sum())
        self._decisions.unknown_because["following"] += int((following & truncated).sum())
        return part.next_observations[ends], ~(repeated | following)

    def _repeated(self, part: Rows, recorded: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[E] bool, whether the next observation is empty, or the step's own while the row before was moving."""
        finals, own = recorded[ends], part.observations[ends]
        axes = tuple(range(1, finals.ndim))
        before = np.maximum(ends - 1, 0)
        moving = (recorded[before] != part.observations[before]).any(axes)
        moving[ends == 0] = self._moving
        empty = ((finals == 0).all(axes) & (own != 0).any(axes)) | np.isnan(finals).all(axes)
        repeated: np.ndarray = empty | ((finals == own).all(axes) & moving)
        return repeated

    def _assemble(
        self,
        part: Rows,
        timeouts: np.ndarray,
        end: np.ndarray,
        keep: np.ndarray,
        finals: np.ndarray,
        observed: np.ndarray,
        last: bool,
    ) -> Iterator[Block]:
        unfinished = last and not end[-1] and bool(keep[-1])
        final = part.observations[-1]
        drop = unfinished
        if part.next_observations is not None:
            if unfinished and not self._repeated(part, part.next_observations, np.array([len(part) - 1]))[0]:
                final, drop = part.next_observations[-1], False
            self._moving = bool((part.next_observations[-1] != part.observations[-1]).any())
        ends = np.flatnonzero(end)
        terminated, timed_out = part.terminals[ends], timeouts[ends]
        if drop:
            keep = keep & (np.arange(len(keep)) < len(keep) - 1)
        if not keep.all():
            part, ends = part[keep], np.cumsum(keep)[ends] - 1
        first = self._assembler.n_closed
        block = self._assembler.add(
            part.observations,
            part.actions,
            part.rewards,
            ends,
            terminated,
            timed_out | ~terminated,
            finals,
            observed,
        )
        if block:
            unknown = np.flatnonzero(~observed & ~terminated)
            self._decisions.name_unknown(first + unknown, block.trajectories.lengths[unknown] - 1)
            yield block
        if unfinished:
            self._decisions.unfinished = (self._assembler.n_closed, self._assembler.n_open, drop)
            block = self._assembler.close(final)
            if block:
                yield block


def _with_following(parts: Iterator[Rows]) -> Iterator[tuple[Rows, np.ndarray]]:
    """Each part with the observations that follow its rows: as many as rows, one fewer for the last part."""
    part = next(parts)
    for coming in parts:
        yield part, np.concatenate([part.observations[1:], coming.observations[:1]])
        part = coming
    yield part, part.observations[1:]
