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
   `next_observations` row; without those it is the observation of the last row, whose step is dropped.

The observation after an episode's last step is its own last `next_observations` row. It is not known, and a truncated
episode is then never bootstrapped from its last step, which is kept: without `next_observations`; where the row is all
zeros, or repeats the step's own observation though the episode was moving; and where it is the first observation of
the following episode and no row of the file so far shows a jump (`next_observations` made by shifting).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from data.findings import Finding, Severity
from data.readers.actions import ActionKind
from data.readers.episodes import EpisodeAssembler
from data.readers.reader import Block, Reader, RefusedError

PLACES = 5
"""So many places of a kind are named; the rest is counted."""

TOLERANCE = 1e-5
"""Observations closer than this part of their size are the same, rounded on the way."""

LONG = 4.0
"""A step is long if some column moves so many times as far as in 99 % of steps. Measured in MuJoCo locomotion and
mazes: ordinary steps reach 3.4, and nine resets in ten are beyond 4.2, but for HalfCheetah's, which do not stand out.
Columns that hardly ever move are not looked at."""

SAMPLE = 1 << 14
"""So many steps show what an ordinary step is."""


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
    rewards: [n] float32 or None. terminals, timeouts: [n] bool; timeouts None if the source has none.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray | None
    terminals: np.ndarray
    timeouts: np.ndarray | None
    next_observations: np.ndarray | None


class Cutter:
    """Cuts a stream of rows into episodes by the rules of this module, and adds what it decided to `findings`."""

    def __init__(self, settings: FlatReader, kind: ActionKind, path: Path, findings: list[Finding]) -> None:
        self._settings, self._path, self._findings = settings, path, findings
        self._assembler = EpisodeAssembler(kind)
        self._row = 0  # rows of the parts before this one
        self._since = 0  # steps since the last cut, for max_episode_steps
        self._reached = False  # whether the open recording has had its goal, for goals: first
        self._moving = False  # whether the row before this part moved
        self._jumped = False  # whether any jump was seen: next_observations are the episodes' own
        self._has_timeouts = self._has_next = False
        self._last_terminal = self._last_jump = False  # of the row before this part
        self._unflagged: list[np.ndarray] = []  # rows that jump without a flag
        self._going_on: list[np.ndarray] = []  # rows with a flag that do not jump
        self._n_going_on_timeouts = self._n_changed = self._n_dropped = self._n_single = 0
        self._n_flag_apart = self._n_flag_right = 0
        self._long: list[int] = []
        self._unknown: list[tuple[int, int]] = []  # (episode, step) of truncated ends without a final observation
        self._n_unknown = {"missing": 0, "repeated": 0, "following": 0}
        self._unfinished: tuple[int, int, bool] | None = None

    def blocks(self, parts: Iterator[Rows]) -> Iterator[Block]:
        """Whole episodes of the rows in `parts`, in order. Raises RefusedError where no rule can tell their ends."""
        part = next(parts)
        for coming in parts:
            yield from self._cut(part, coming.observations[0])
            part = coming
        yield from self._cut(part, None)
        self._report()

    def _cut(self, part: Rows, following: np.ndarray | None) -> Iterator[Block]:
        """The episodes that end in `part`; `following` is the first observation after it, None at the very end."""
        n = len(part.terminals)
        after = part.observations[1:]
        if following is not None:
            after = np.concatenate([after, following[None]])
        timeouts = part.timeouts
        self._has_timeouts = timeouts is not None
        self._has_next = part.next_observations is not None
        if timeouts is None or self._settings.timeouts == "ignore":
            timeouts = np.zeros(n, bool)
        flagged = part.terminals | timeouts
        jump = self._jumps(part, after, flagged, timeouts)
        boundary = timeouts | (jump & part.terminals if self._settings.timeouts == "trust" else jump)
        if self._uses_limit:
            boundary |= self._limit(boundary | part.terminals if self._settings.goals == "every_flag" else boundary)
        end, keep = self._goals(part.terminals, boundary)
        cut_before = np.concatenate([[self._last_jump], jump[:-1]])
        terminal_before = np.concatenate([[self._last_terminal], part.terminals[:-1]])
        self._n_single += int((part.terminals & terminal_before & ~cut_before).sum())
        self._last_terminal, self._last_jump = bool(part.terminals[-1]), bool(jump[-1])
        yield from self._assemble(part, after, timeouts, jump, end, keep, last=following is None)
        self._row += n

    # ------------------------------------------------------------ where

    @property
    def _uses_limit(self) -> bool:
        ignored = self._settings.timeouts == "ignore" or not self._has_timeouts
        return ignored and self._settings.max_episode_steps is not None

    def _jumps(self, part: Rows, after: np.ndarray, flagged: np.ndarray, timeouts: np.ndarray) -> np.ndarray:
        """[n] bool, rows whose next observation is not the following row (rule 2)."""
        jump = np.zeros(len(flagged), bool)
        if part.next_observations is None:
            self._look_for_long_steps(part.observations, after, flagged)
            return jump
        m = len(after)
        recorded, before = _columns(part.next_observations[:m]), _columns(part.observations[:m])
        after = _columns(after)
        rows = np.flatnonzero((recorded != after).any(1))
        same = _same(recorded[rows], after[rows])
        moved = recorded[rows] != before[rows]
        moved[~moved.any(1)] = True
        jumps = 2 * (moved & ~same).sum(1) > moved.sum(1)
        jump[rows[jumps]] = True
        self._n_changed += int((~same.all(1) & ~jumps & ~flagged[rows]).sum())
        self._jumped |= bool(jumps.any())
        self._unflagged.append(self._row + np.flatnonzero(jump & ~flagged))
        going_on = flagged[:m] & ~jump[:m]
        self._going_on.append(self._row + np.flatnonzero(going_on))
        self._n_going_on_timeouts += int((going_on & timeouts[:m]).sum())
        return jump

    def _look_for_long_steps(self, observations: np.ndarray, after: np.ndarray, flagged: np.ndarray) -> None:
        """Without next observations: whether flags stand beside the long steps, and long steps without a flag."""
        m = len(after)
        with np.errstate(invalid="ignore", over="ignore"):
            step = np.abs(_columns(after).astype(np.float32) - _columns(observations[:m]).astype(np.float32))
        ordinary = np.flatnonzero(~flagged[:m])
        if len(ordinary) < 3:
            return
        beside = np.zeros(m + 2, bool)
        beside[1:-1] = flagged[:m]
        apart = ordinary[~(beside[ordinary] | beside[ordinary + 2])]
        sample = apart[:: max(1, len(apart) // SAMPLE)]
        if len(sample) < 3:
            return
        usual = np.quantile(step[sample], 0.99, axis=0)
        long: np.ndarray = (step > np.where(usual > 0, LONG * usual, np.inf)).any(1)
        flags = np.flatnonzero(flagged[1 : m - 1]) + 1
        near = (long[flags - 1] & ~flagged[flags - 1]) | (long[flags + 1] & ~flagged[flags + 1])
        self._n_flag_right += int(long[flags].sum())
        self._n_flag_apart += int((near & ~long[flags]).sum())
        self._long += (self._row + apart[long[apart]]).tolist()

    def _limit(self, end: np.ndarray) -> np.ndarray:
        """[n] bool, rows that are the last of `max_episode_steps` since the last end."""
        limit = self._settings.max_episode_steps
        assert limit is not None
        cut = np.zeros(len(end), bool)
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
        self._n_dropped += int(reached.sum())
        return ~reached & (terminals | boundary), ~reached

    # ------------------------------------------------------------ episodes

    def _assemble(
        self,
        part: Rows,
        after: np.ndarray,
        timeouts: np.ndarray,
        jump: np.ndarray,
        end: np.ndarray,
        keep: np.ndarray,
        last: bool,
    ) -> Iterator[Block]:
        n = len(end)
        unfinished = last and not end[-1] and bool(keep[-1])
        final = part.observations[-1] if part.next_observations is None else part.next_observations[-1]
        if unfinished and part.next_observations is None:
            keep = keep.copy()
            keep[-1] = False
        ends = np.flatnonzero(end)
        following = np.zeros(n, bool)
        following[: len(after)] = ~jump[: len(after)] & ~np.bool_(self._jumped)
        finals, observed = self._finals(part, ends, following)
        if not keep.all():
            part = _selected(part, keep)
            ends, timeouts = np.cumsum(keep)[ends] - 1, timeouts[keep]
        terminated = part.terminals[ends]
        first = self._assembler.n_closed
        block = self._assembler.add(
            part.observations,
            part.actions,
            part.rewards,
            ends,
            terminated,
            timeouts[ends] | ~terminated,
            finals,
            observed,
        )
        if block:
            lengths = block.trajectories.lengths
            unknown = np.flatnonzero(~observed & ~terminated)
            self._unknown += [(first + int(e), int(lengths[e]) - 1) for e in unknown[: PLACES - len(self._unknown)]]
            yield block
        if unfinished:
            self._unfinished = (self._assembler.n_closed, self._assembler.n_open, part.next_observations is None)
            block = self._assembler.close(final)
            if block:
                yield block

    def _finals(self, part: Rows, ends: np.ndarray, following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[E, ...] the observation after each end, and [E] bool whether it is the episode's own."""
        if part.next_observations is None:
            unknown = ~part.terminals[ends]
            self._n_unknown["missing"] += int(unknown.sum())
            return part.observations[ends], np.zeros(len(ends), bool)
        finals, own = part.next_observations[ends], part.observations[ends]
        axes = tuple(range(1, finals.ndim))
        before = np.maximum(ends - 1, 0)
        moving = (part.next_observations[before] != part.observations[before]).any(axes)
        moving[ends == 0] = self._moving
        self._moving = bool((part.next_observations[-1] != part.observations[-1]).any())
        repeated = (finals == own).all(axes) & moving
        repeated |= (finals == 0).all(axes) & (own != 0).any(axes)
        shifted = following[ends] & ~repeated
        unknown = ~part.terminals[ends]
        self._n_unknown["repeated"] += int((repeated & unknown).sum())
        self._n_unknown["following"] += int((shifted & unknown).sum())
        return finals, ~(repeated | shifted)

    # ------------------------------------------------------------ findings

    def _report(self) -> None:
        unflagged = np.concatenate([np.zeros(0, np.int64), *self._unflagged])
        going_on = np.concatenate([np.zeros(0, np.int64), *self._going_on])
        checked = self._has_timeouts and self._settings.timeouts == "check"
        if checked:
            self._refuse_contradictions(unflagged, going_on)
        if len(unflagged) > max(2, self._row // 2):
            self._refuse(
                "next-observations-disagree",
                f"'next_observations' are not the following rows in {len(unflagged):,} of {self._row:,} steps: the "
                "rows are shuffled, or the column is shifted or scaled. Episodes cannot be told; sort the rows first.",
            )
        self._report_ends(unflagged)
        self._report_goals(going_on)
        self._report_finals()

    def _refuse_contradictions(self, unflagged: np.ndarray, going_on: np.ndarray) -> None:
        beside = np.isin(unflagged, np.concatenate([going_on - 1, going_on + 1]))
        if beside.any() or (len(unflagged) and self._n_going_on_timeouts):
            self._refuse(
                "late-flags",
                f"flags and observations contradict each other: {_rows(unflagged)} end without a flag (the next "
                f"observation is not the following row), {_rows(going_on)} have a flag and go on. "
                "Cut at the observations alone with timeouts: ignore, or at the flags alone with timeouts: trust.",
            )
        if self._n_flag_apart > self._n_flag_right:
            self._refuse(
                "late-flags",
                f"the flags seem to be set a row beside the true ends: at {self._n_flag_apart:,} of them the step "
                f"before or after is {LONG:g} times longer than others and the step across the flag is not. "
                "Repair the flags, or believe them with timeouts: trust.",
            )

    def _report_ends(self, unflagged: np.ndarray) -> None:
        limit = self._settings.max_episode_steps
        if self._has_timeouts and self._settings.timeouts != "ignore":
            if limit is not None:
                self._note("limit-not-used", "max_episode_steps is not used: the file has 'timeouts'.")
            if len(unflagged) and self._settings.timeouts == "trust":
                self._warn(
                    "crosses-jumps",
                    f"{_rows(unflagged)} jump without a flag and were not cut, as asked: transitions cross a reset.",
                    len(unflagged),
                )
            elif len(unflagged):
                self._warn(
                    "unflagged-ends",
                    f"{_rows(unflagged)} end without a flag: the next observation is not the following row. "
                    "Cut there, as truncated.",
                    len(unflagged),
                )
        else:
            why = "'timeouts' are ignored, as asked" if self._has_timeouts else "there are no 'timeouts'"
            if self._jumped or limit is not None:
                places = ["terminals"]
                places += ["where the next observation is not the following row"] if self._has_next else []
                places += [f"after {limit:,} steps"] if limit is not None else []
                self._note(
                    "no-timeouts",
                    f"{why}: cut at {', '.join(places)}; {len(unflagged):,} cuts without a flag by observations.",
                    len(unflagged),
                )
            elif self._last_terminal and self._settings.goals == "every_flag":
                self._warn(
                    "no-timeouts",
                    f"{why}: cut at terminals alone, which explain the last row. If recordings were also cut after a "
                    "number of steps, say so with max_episode_steps.",
                )
            else:
                self._refuse(
                    "no-rule",
                    f"{why}, no next observation shows a cut, and terminals alone do not say where recordings end: "
                    "where episodes end cannot be told. Say after how many steps they were cut: max_episode_steps.",
                )
        if self._long:
            self._warn(
                "long-steps",
                f"{_rows(np.array(self._long))} are followed by a step {LONG:g} times longer than others, without a "
                "flag: perhaps resets. If recordings were cut after a number of steps, say so with max_episode_steps.",
                len(self._long),
            )
        if self._unfinished:
            self._report_unfinished(*self._unfinished)

    def _report_unfinished(self, episode: int, steps: int, dropped: bool) -> None:
        if not dropped:
            message = (
                f"the last episode ({episode}, {steps:,} steps) ends with the file, without a flag: kept as truncated."
            )
        elif steps:
            message = (
                f"the last episode ({episode}) ends with the file, without a flag: kept as truncated with {steps:,} "
                "steps; the last row is its last observation, and its step is dropped."
            )
        else:
            message = "the last row begins an episode that the file does not continue: dropped."
        severity = Severity.WARNING if dropped else Severity.NOTE
        self._findings.append(
            Finding(code="unfinished-last-episode", severity=severity, message=message, episode=episode)
        )

    def _report_goals(self, going_on: np.ndarray) -> None:
        n_goals = len(going_on) - self._n_going_on_timeouts
        if self._n_changed:
            self._warn(
                "observation-changed",
                f"in {self._n_changed:,} steps part of the next observation is not in the following row though the "
                "episode goes on (a goal was changed): the following row is believed.",
                self._n_changed,
            )
        if self._n_going_on_timeouts and self._jumped:
            self._note(
                "timeouts-go-on",
                f"{self._n_going_on_timeouts:,} rows with a timeout go on in the following row: cut there.",
                self._n_going_on_timeouts,
            )
        goals = self._settings.goals
        if goals == "first":
            self._warn(
                "steps-after-goal",
                f"cut at the first terminal of each recording, as asked; {self._n_dropped:,} steps after it dropped.",
                self._n_dropped,
            )
        elif goals == "whole":
            self._note("goals-whole", "terminals inside a recording do not cut it, as asked.")
        elif self._n_single:
            self._warn(
                "one-step-episodes",
                f"{self._n_single:,} episodes are one step that terminates, made by cutting at every terminal "
                f"({n_goals:,} terminals go on): choose goals: first or goals: whole if terminals mark a goal region.",
                self._n_single,
            )
        elif n_goals and self._jumped:
            self._warn(
                "terminals-go-on",
                f"{n_goals:,} rows with a terminal go on in the following row: cut there. "
                "Choose goals: first or goals: whole if terminals mark a goal region.",
                n_goals,
            )

    def _report_finals(self) -> None:
        reasons = {
            "missing": "there are no 'next_observations'",
            "repeated": "their 'next_observations' row is empty or a copy of the step's own observation",
            "following": "their 'next_observations' row is the first of the following episode",
        }
        total = sum(self._n_unknown.values())
        if total:
            why = "; ".join(text for reason, text in reasons.items() if self._n_unknown[reason])
            where = "; ".join(f"episode {e}, step {t}" for e, t in self._unknown)
            more = f" and {total - len(self._unknown):,} more" if total > len(self._unknown) else ""
            self._findings.append(
                Finding(
                    code="final-observation-unknown",
                    severity=Severity.WARNING,
                    message=f"the observation after the last step of {total:,} truncated episodes is not known "
                    f"({why}): {where}{more}. These steps are kept and labelled, and never bootstrapped from.",
                    episode=self._unknown[0][0],
                    step=self._unknown[0][1],
                    count=total,
                )
            )

    def _note(self, code: str, message: str, count: int = 1) -> None:
        self._findings.append(Finding(code=code, severity=Severity.NOTE, message=message, count=count))

    def _warn(self, code: str, message: str, count: int = 1) -> None:
        self._findings.append(Finding(code=code, severity=Severity.WARNING, message=message, count=count))

    def _refuse(self, code: str, message: str) -> None:
        self._findings.append(Finding(code=code, severity=Severity.ERROR, message=message))
        raise RefusedError(self._path, self._findings)


def _columns(rows: np.ndarray) -> np.ndarray:
    """[n, D] of rows [n, ...]."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise: equal but for rounding; NaN equals anything, since it cannot show a difference."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = np.abs(x - y) <= TOLERANCE * np.maximum(np.abs(x), np.abs(y))
    same: np.ndarray = close | np.isnan(x) | np.isnan(y) | (x == y)
    return same


def _selected(part: Rows, keep: np.ndarray) -> Rows:
    return Rows(
        observations=part.observations[keep],
        actions=part.actions[keep],
        rewards=None if part.rewards is None else part.rewards[keep],
        terminals=part.terminals[keep],
        timeouts=None if part.timeouts is None else part.timeouts[keep],
        next_observations=None if part.next_observations is None else part.next_observations[keep],
    )


def _rows(rows: np.ndarray) -> str:
    """`rows 7, 15 and 3 more`."""
    named = ", ".join(f"{row:,}" for row in rows[:PLACES])
    more = f" and {len(rows) - PLACES:,} more" if len(rows) > PLACES else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"
