"""Soundness: what every reader's episodes must be before they are stored, checked once for all formats.

Observations and actions are finite, continuous actions lie within the declared bounds, discrete ones below their
declared number. Episodes and steps are named as the source counts them, before any is left out; a final observation
counts as the step after the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data.findings import Finding, Severity
from data.readers.reader import Block, Reader, RefusedError, Source

PLACES = 5
"""So many places of a kind are named; the rest is counted."""

ROUNDING = 1e-6
"""Actions beyond a bound by at most this part of the larger bound are rounding (eight float32 steps), left as is."""


def sound_blocks(source: Source, reader: Reader, path: Path) -> Iterator[Block]:
    """The blocks of a source, finite and within what is declared.

    What is not refuses the file after all of it was read, so that the message names the first places and counts all
    of them; by the reader's settings such episodes are left out, or actions clipped, and counted. Rewards that are not
    finite refuse nothing, but are said. Raises RefusedError.
    """
    checks = _Checks(reader)
    n_kept = 0
    for block in source.blocks():
        sound = checks.passed(block)
        if sound is not None:
            n_kept += sound.trajectories.n_episodes
            yield sound
    checks.report(source.findings)
    if not n_kept and not any(f.severity is Severity.ERROR for f in source.findings):
        message = "no steps: there is not one episode to store."
        source.findings.append(Finding(code="no-steps", severity=Severity.ERROR, message=message))
    if any(f.severity is Severity.ERROR for f in source.findings):
        raise RefusedError(path, source.findings)


@dataclass
class _Places:
    """Where something is wrong: the first places (episode, step, value), and how many there are."""

    first: list[tuple[int, int, str]] = field(default_factory=list)
    count: int = 0

    def add(self, episodes: np.ndarray, steps: np.ndarray, values: list[str]) -> None:
        room = PLACES - len(self.first)
        self.first += [(int(e), int(t), v) for e, t, v in zip(episodes[:room], steps[:room], values, strict=False)]
        self.count += len(episodes)

    def text(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return "; ".join(f"episode {e}, step {t} ({v})" for e, t, v in self.first) + more


class _Checks:
    def __init__(self, reader: Reader) -> None:
        self._leave_out, self._clip = reader.not_finite == "leave_out", reader.out_of_bounds == "clip"
        self._not_finite = {key: _Places() for key in ("observations", "actions", "rewards")}
        self._outside = _Places()
        self._n_episodes = self._n_left_out = self._n_left_out_steps = 0

    def passed(self, block: Block) -> Block | None:
        """What of a block may be stored."""
        trajectories = block.trajectories
        spoiled = np.zeros(trajectories.n_episodes, bool)
        starts = trajectories.offsets[:-1]
        observation_starts = starts + np.arange(len(starts))
        self._look("observations", np.asarray(trajectories.observations), observation_starts, spoiled)
        self._look("actions", np.asarray(trajectories.actions), starts, spoiled)
        if block.rewards is not None:
            self._look("rewards", block.rewards, starts, spoiled if self._leave_out else spoiled.copy())
        block = self._within(block, spoiled)
        self._n_episodes += trajectories.n_episodes
        if not spoiled.any():
            return block
        self._n_left_out += int(spoiled.sum())
        self._n_left_out_steps += int(trajectories.lengths[spoiled].sum())
        if spoiled.all():
            return None
        rewards = None if block.rewards is None else block.rewards[~spoiled[trajectories.episode_index]]
        return Block(block.trajectories.select(np.flatnonzero(~spoiled)), rewards)

    def _look(self, key: str, rows: np.ndarray, starts: np.ndarray, spoiled: np.ndarray) -> None:
        """Find rows that are not finite, and mark their episodes."""
        if rows.dtype.kind != "f" or np.isfinite(rows).all():
            return
        flat = rows.reshape(len(rows), -1)
        wrong = np.flatnonzero(~np.isfinite(flat).all(1))
        episodes = np.searchsorted(starts, wrong, side="right") - 1
        values = [str(flat[row][~np.isfinite(flat[row])][0]) for row in wrong[:PLACES]]
        self._not_finite[key].add(self._n_episodes + episodes, wrong - starts[episodes], values)
        spoiled[episodes] = True

    def _within(self, block: Block, spoiled: np.ndarray) -> Block:
        """Compare actions with what is declared; clip them if asked."""
        trajectories = block.trajectories
        actions = np.asarray(trajectories.actions)
        if trajectories.n_actions is not None:
            self._clip = False
            outside = (actions < 0) | (actions >= np.array(trajectories.n_actions).reshape(actions.shape[1:] or ()))
        elif trajectories.action_bounds is not None:
            low, high = trajectories.action_bounds
            margin = ROUNDING * max(abs(low), abs(high))
            outside = (actions < low - margin) | (actions > high + margin)
        else:
            return block
        flat = outside.reshape(len(outside), -1)
        wrong = np.flatnonzero(flat.any(1))
        wrong = wrong[~spoiled[trajectories.episode_index[wrong]]]
        if not len(wrong):
            return block
        episodes = trajectories.episode_index[wrong]
        values = [str(actions.reshape(len(actions), -1)[row][flat[row]][0]) for row in wrong[:PLACES]]
        self._outside.add(self._n_episodes + episodes, wrong - trajectories.offsets[episodes], values)
        if not self._clip:
            return block
        clipped = np.where(outside, np.clip(actions, low, high), actions)
        return replace(block, trajectories=replace(trajectories, actions=clipped))

    def report(self, findings: list[Finding]) -> None:
        """Say what was found, once all blocks have passed."""
        wrong = [key for key, places in self._not_finite.items() if places.count]
        for key in wrong:
            advice = "" if self._leave_out or key != wrong[-1] else " Repair, or leave out with not_finite: leave_out."
            if wrong == ["rewards"] and not self._leave_out:
                advice = " The dataset is stored without `source` labels; others are not affected." + advice
            settled = self._leave_out or wrong == ["rewards"]
            self._add(findings, "not-finite", settled, f"'{key}' is not finite at ", advice, self._not_finite[key])
        if self._n_left_out and self._leave_out:
            message = f"{self._n_left_out:,} episodes with {self._n_left_out_steps:,} steps left out, as asked."
            code = "episodes-left-out"
            findings.append(Finding(code=code, severity=Severity.WARNING, message=message, count=self._n_left_out))
        if self._outside.count:
            advice = (
                " Clipped, as asked." if self._clip else " Repair, or clip continuous ones with out_of_bounds: clip."
            )
            self._add(
                findings, "action-out-of-bounds", self._clip, "'actions' is out of bounds at ", advice, self._outside
            )

    def _add(self, findings: list[Finding], code: str, settled: bool, found: str, advice: str, places: _Places) -> None:
        findings.append(
            Finding(
                code=code,
                severity=Severity.WARNING if settled else Severity.ERROR,
                message=f"{found}{places.text()}.{advice}",
                episode=places.first[0][0],
                step=places.first[0][1],
                count=places.count,
            )
        )
