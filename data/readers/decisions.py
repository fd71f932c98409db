"""What the cutting of a flat recording decided: counted on the way, said as findings at the end, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.findings import Finding, Severity
from data.readers.continuity import LONG
from data.readers.reader import RefusedError

PLACES = 5
"""So many places of a kind are named; the rest is counted."""

REASONS = {
    "missing": "there are no 'next_observations'",
    "repeated": "their 'next_observations' row is empty or a copy of the step's own observation",
    "unrecorded": "the file says that it was not recorded",
    "following": "their 'next_observations' row is the first of the following episode",
}


class Decisions:
    """Counts and first places over all parts of a recording. The rules are in `data/readers/flat.py`."""

    def __init__(self, path: Path, findings: list[Finding]) -> None:
        self._path, self._findings = path, findings
        self._n_rows = 0
        self._has_timeouts = self._has_next = False
        self._last_terminal = self._last_jump = False  # of the row before this part
        self._unflagged: list[np.ndarray] = []  # rows that jump without a flag
        self._going_on: list[np.ndarray] = []  # rows with a flag that do not jump
        self._any_jump = False
        self._n_timeouts_going_on = self._n_changed = self._n_single = 0
        self._n_terminals, self._n_timeouts = {"on": 0, "beside": 0}, {"on": 0, "beside": 0}  # flags, by long steps
        self._long: list[np.ndarray] = []  # rows with a long step and no flag
        self._unknown: list[tuple[int, int]] = []
        self.n_dropped = 0
        """Steps dropped after the first goal of a recording."""
        self.unknown_because = dict.fromkeys(REASONS, 0)
        """Truncated ends whose final observation is not known, by reason."""
        self.unfinished: tuple[int, int, bool] | None = None
        """Index and steps of the last episode, if it ends with the file, and whether its last step was dropped."""

    # ------------------------------------------------------------ counting

    def saw_jumps(
        self, terminals: np.ndarray, timeouts: np.ndarray, jump: np.ndarray, changed: np.ndarray, n_followed: int
    ) -> None:
        """Take up a part with next observations; its first `n_followed` rows are followed by another."""
        flagged = terminals | timeouts
        going_on = flagged & ~jump & (np.arange(len(jump)) < n_followed)
        self._unflagged.append(self._n_rows + np.flatnonzero(jump & ~flagged))
        self._going_on.append(self._n_rows + np.flatnonzero(going_on))
        self._any_jump |= bool(jump.any())
        self._n_timeouts_going_on += int((going_on & timeouts).sum())
        self._n_changed += int((changed & ~flagged).sum())

    def saw_steps(self, terminals: np.ndarray, timeouts: np.ndarray, end: np.ndarray, long: np.ndarray) -> None:
        """Take up a part without next observations: do flags stand on long steps, or beside them?

        end: [n] bool, rows that end an episode, by a flag or otherwise. long: [m] bool, see `long_steps`.
        """
        m = len(long)
        lone = long & ~(terminals | timeouts)[:m]
        for flags, counts in ((terminals, self._n_terminals), (timeouts, self._n_timeouts)):
            rows = np.flatnonzero(flags[1 : m - 1]) + 1
            counts["on"] += int(long[rows].sum())
            counts["beside"] += int((~long[rows] & (lone[rows - 1] | lone[rows + 1])).sum())
        near = np.convolve(terminals | timeouts, np.ones(3), mode="same")[:m] > 0
        self._long.append(self._n_rows + np.flatnonzero(long & ~near & ~end[:m]))

    def saw_rows(self, terminals: np.ndarray, jump: np.ndarray, has_timeouts: bool, has_next: bool) -> None:
        """Finish a part."""
        jump_before = np.concatenate([[self._last_jump], jump[:-1]])
        terminal_before = np.concatenate([[self._last_terminal], terminals[:-1]])
        self._n_single += int((terminals & terminal_before & ~jump_before).sum())
        self._last_terminal, self._last_jump = bool(terminals[-1]), bool(jump[-1])
        self._has_timeouts, self._has_next = has_timeouts, has_next
        self._n_rows += len(terminals)

    def name_unknown(self, episodes: np.ndarray, steps: np.ndarray) -> None:
        """Remember the first truncated ends whose final observation is not known."""
        room = PLACES - len(self._unknown)
        self._unknown += [(int(e), int(t)) for e, t in zip(episodes[:room], steps[:room], strict=True)]

    # ------------------------------------------------------------ saying

    def report(self, timeouts: str, goals: str, limit: int | None) -> None:
        """Add the findings. Raises RefusedError for contradictions, and where no rule can tell the ends."""
        unflagged = np.concatenate([np.zeros(0, np.int64), *self._unflagged])
        going_on = np.concatenate([np.zeros(0, np.int64), *self._going_on])
        if self._has_timeouts and timeouts == "check":
            self._refuse_contradictions(unflagged, going_on)
        if len(unflagged) > max(2, self._n_rows // 2):
            self._refuse(
                "next-observations-disagree",
                f"'next_observations' are not the following rows in {len(unflagged):,} of {self._n_rows:,} steps: the "
                "rows are shuffled, or the column is shifted or scaled. Episodes cannot be told; sort the rows first.",
            )
        if self._has_timeouts and timeouts != "ignore":
            self._report_unflagged(unflagged, timeouts == "trust")
            if limit is not None:
                self._note("limit-not-used", "max_episode_steps is not used: the file has 'timeouts'.")
        else:
            self._report_rule(unflagged, goals, limit)
        long = np.concatenate([np.zeros(0, np.int64), *self._long])
        if len(long):
            self._warn(
                "long-steps",
                f"{_rows(long)} are followed by a step {LONG:g} times longer than others, without a flag: perhaps "
                "resets. If recordings were cut after a number of steps, say so with max_episode_steps.",
                len(long),
            )
        if self.unfinished:
            self._report_unfinished(*self.unfinished)
        self._report_goals(goals, len(going_on) - self._n_timeouts_going_on)
        self._report_unknown()

    def _refuse_contradictions(self, unflagged: np.ndarray, going_on: np.ndarray) -> None:
        beside = np.isin(unflagged, np.concatenate([going_on - 1, going_on + 1]))
        if beside.any() or (len(unflagged) and self._n_timeouts_going_on):
            self._refuse(
                "late-flags",
                f"flags and observations contradict each other: {_rows(unflagged)} end without a flag (the next "
                f"observation is not the following row), {_rows(going_on)} have a flag and go on. "
                "Cut at the observations alone with timeouts: ignore, or at the flags alone with timeouts: trust.",
            )
        for key, counts in (("terminals", self._n_terminals), ("timeouts", self._n_timeouts)):
            if counts["beside"] > counts["on"]:
                self._refuse(
                    "late-flags",
                    f"'{key}' seem to be set a row beside the true ends: at {counts['beside']:,} of them the step "
                    f"before or after is {LONG:g} times longer than others and the step across the flag is not. "
                    "Repair them, or believe all flags with timeouts: trust.",
                )

    def _report_unflagged(self, unflagged: np.ndarray, trusted: bool) -> None:
        if len(unflagged) and trusted:
            message = f"{_rows(unflagged)} jump without a flag and were not cut, as asked: transitions cross a reset."
            self._warn("crosses-jumps", message, len(unflagged))
        elif len(unflagged):
            self._warn(
                "unflagged-ends",
                f"{_rows(unflagged)} end without a flag: the next observation is not the following row. "
                "Cut there, as truncated.",
                len(unflagged),
            )

    def _report_rule(self, unflagged: np.ndarray, goals: str, limit: int | None) -> None:
        why = "'timeouts' are ignored, as asked" if self._has_timeouts else "there are no 'timeouts'"
        if self._any_jump or limit is not None:
            places = ["terminals"]
            places += ["where the next observation is not the following row"] if self._has_next else []
            places += [f"after {limit:,} steps"] if limit is not None else []
            self._note(
                "no-timeouts",
                f"{why}: cut at {', '.join(places)}; {len(unflagged):,} cuts without a flag by observations.",
                len(unflagged),
            )
        elif self._last_terminal and goals == "every_flag":
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
        code = "unfinished-last-episode"
        self._findings.append(Finding(code=code, severity=severity, message=message, episode=episode))

    def _report_goals(self, goals: str, n_going_on: int) -> None:
        choose = "choose goals: first or goals: whole if terminals mark a goal region."
        if self._n_changed:
            self._warn(
                "observation-changed",
                f"in {self._n_changed:,} steps part of the next observation is not in the following row though the "
                "episode goes on (a goal was changed): the following row is believed.",
                self._n_changed,
            )
        if self._n_timeouts_going_on and self._any_jump:
            self._note(
                "timeouts-go-on",
                f"{self._n_timeouts_going_on:,} rows with a timeout go on in the following row: cut there.",
                self._n_timeouts_going_on,
            )
        if goals == "first":
            self._warn(
                "steps-after-goal",
                f"cut at the first terminal of each recording, as asked; {self.n_dropped:,} steps after it dropped.",
                self.n_dropped,
            )
        elif goals == "whole":
            self._note("goals-whole", "terminals inside a recording do not cut it, as asked.")
        elif self._n_single:
            self._warn(
                "one-step-episodes",
                f"{self._n_single:,} terminals follow a terminal: cutting at every one makes episodes of one step; "
                + choose,
                self._n_single,
            )
        elif n_going_on and self._any_jump:
            self._warn(
                "terminals-go-on",
                f"{n_going_on:,} rows with a terminal go on in the following row: cut there; " + choose,
                n_going_on,
            )

    def _report_unknown(self) -> None:
        total = sum(self.unknown_because.values())
        if not total:
            return
        why = "; ".join(text for reason, text in REASONS.items() if self.unknown_because[reason])
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


def _rows(rows: np.ndarray) -> str:
    """`rows 7, 15 and 3 more`."""
    named = ", ".join(f"{row:,}" for row in rows[:PLACES])
    more = f" and {len(rows) - PLACES:,} more" if len(rows) > PLACES else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"
