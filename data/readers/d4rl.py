"""D4RL: flat HDF5 arrays, one row a step, episodes marked by flags.

Keys: `observations`, `actions`, `terminals`; optionally `rewards`, `timeouts`, `next_observations`. Everything else
(`infos/*`, `metadata/*`) is listed; small texts and numbers of `metadata/*` and the file's attributes are kept.

Where episodes end, in this order. Each decision is a finding.

1. A row with `terminals` or `timeouts` ends an episode: terminated, truncated, or both.
2. If `next_observations` are there, each is compared with the observation of the following row. Where they differ in
   most of the columns that moved in that step, the recording was cut there (a *jump*); where they differ in a few
   columns only, something else was changed while the episode went on (a new goal), and it is counted.
3. A jump without a flag ends an episode too, as truncated. But if flags stand beside the jumps (a row late or early),
   flags and observations contradict each other and the file is refused; `timeouts: ignore` cuts at the jumps alone,
   `timeouts: trust` at the flags alone.
4. Without `timeouts` (first generation of files), episodes end at terminals, at jumps if `next_observations` are
   there, and after `max_episode_steps` if given. If there is neither and the last row is no terminal, the file is
   refused and the rule asked for.
5. Rows with `terminals` that go on (mazes: every step near the goal) are cut by `goals`: at `every_flag` (the default:
   nothing is dropped, episodes of one step arise and are counted), at the `first` in each recording, dropping the
   steps after it, or not at all (`whole` recordings, ended by timeouts and jumps).
6. The last episode, if no flag ends it, is kept as truncated. Its last observation is that of the last
   `next_observations` row; without those, the observation of the last row, whose step is dropped.

The observation after the last step of an episode is its own last `next_observations` row. Without
`next_observations` it is not known: such steps are kept, marked, and never bootstrapped from. It is not known either
where that row is a copy of the step's own observation though the episode was moving, or is the first observation of
the following episode (a file whose `next_observations` were made by shifting).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import h5py
import numpy as np
from pydantic import Field, JsonValue

from data.findings import Finding, Severity
from data.readers.actions import ActionKind, action_kind
from data.readers.episodes import EpisodeAssembler
from data.readers.hdf5 import HDF5_SIGNATURE, arrays, check_array, open_hdf5, reading, text_of
from data.readers.reader import Block, Reader, Refused, Space

NEEDED = ("observations", "actions", "terminals")
KNOWN = (*NEEDED, "rewards", "timeouts", "next_observations")

SLICE_BYTES = 32 << 20
"""Read about so much at a time, in whole chunks."""

TOLERANCE = 1e-5
"""Observations closer than this part of their size are the same observation, rounded on the way."""

LONG = 10.0
"""A step so many times longer than its neighbours and the median is a reset, not a step."""


class D4RL(Reader):
    """Reads D4RL-style HDF5; the rules are in this module's docstring.

    max_episode_steps: cut after so many steps where the file has no `timeouts`.
    timeouts: `check` flags against observations, `trust` the flags alone, or `ignore` them.
    goals: where to cut rows with `terminals` that go on.
    """

    kind: Literal["d4rl"] = "d4rl"
    max_episode_steps: int | None = Field(default=None, ge=1)
    timeouts: Literal["check", "trust", "ignore"] = "check"
    goals: Literal["every_flag", "first", "whole"] = "every_flag"

    def open(self, path: Path) -> D4RLSource:
        return D4RLSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return False
        with path.open("rb") as stream:
            if stream.read(8) != HDF5_SIGNATURE:
                return False
        with open_hdf5(path) as file:
            return sum(key in NEEDED for key in arrays(file, path)) >= 2


@dataclass
class _Rows:
    """A slice of the file, converted. n rows."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray | None
    terminals: np.ndarray
    timeouts: np.ndarray
    next_observations: np.ndarray | None


class D4RLSource:
    """An opened D4RL file."""

    format = "d4rl"

    def __init__(self, settings: D4RL, path: Path) -> None:
        self._settings, self._path = settings, path
        self.findings: list[Finding] = []
        self._file = open_hdf5(path)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    # ------------------------------------------------------------ structure

    def _open(self) -> None:
        found = arrays(self._file, self._path)
        keys = ", ".join(found) or "none"
        for key in NEEDED:
            if key not in found:
                raise self._refuse("missing-key", f"'{key}' is missing; keys present: {keys}.")
        self._arrays = {key: found[key] for key in KNOWN if key in found}
        for key, array in self._arrays.items():
            check_array(self._path, key, array)
        rows = {key: array.shape[0] if array.shape else 0 for key, array in self._arrays.items()}
        n = self.n_steps = rows["observations"]
        for key, count in rows.items():
            if count != n:
                raise self._refuse("uneven", f"{n:,} observations but {count:,} {key}: every key needs one row a step.")
        if n == 0:
            raise self._refuse("no-steps", "no steps: all arrays are empty.")
        observations = self._arrays["observations"]
        if observations.dtype.kind not in "fiub":
            raise self._refuse("observations-dtype", f"'observations' are {observations.dtype}: expected numbers.")
        self.observation = Space(shape=observations.shape[1:] or (1,), dtype=observations.dtype.name)
        following = self._arrays.get("next_observations")
        if following is not None and following.shape != observations.shape:
            raise self._refuse(
                "shape",
                f"'next_observations' have shape {following.shape} and 'observations' {observations.shape}: "
                "they must be the same.",
            )
        for key in ("rewards", "terminals", "timeouts"):
            array = self._arrays.get(key)
            if array is not None and array.shape not in ((n,), (n, 1)):
                raise self._refuse("shape", f"'{key}' has shape {array.shape}; expected ({n},) or ({n}, 1).")
            if array is not None and array.dtype.kind not in "fiub":
                raise self._refuse("dtype", f"'{key}' is {array.dtype}: expected numbers.")
        self._flagged = "timeouts" in self._arrays and self._settings.timeouts != "ignore"
        self._note_conversions()
        self._understand_actions()
        self._check_rule()
        others = [key for key in found if key not in KNOWN]
        if others:
            self._note("other-keys", f"keys not used: {', '.join(others)}.", count=len(others))
        self.metadata: Mapping[str, JsonValue] = self._read_metadata(found)

    def _note_conversions(self) -> None:
        for key, array in self._arrays.items():
            to = np.dtype(np.float32) if array.dtype.kind == "f" else array.dtype
            if key in ("terminals", "timeouts"):
                to = np.dtype(bool)
            elif key == "rewards":
                to = np.dtype(np.float32)
            elif key == "actions" and array.dtype.kind != "f":
                to = np.dtype(np.int64)
            if array.dtype != to:
                self._note("converted", f"'{key}': {array.dtype.str} converted to {to.name}.")
            if key in ("rewards", "terminals", "timeouts") and array.ndim == 2:
                self._note("reshaped", f"'{key}': ({self.n_steps}, 1) read as ({self.n_steps},).")

    def _understand_actions(self) -> None:
        actions, attributes = self._arrays["actions"], self._file.attrs
        declared: int | tuple[int, ...] | None = self._settings.n_actions
        if declared is None and "action_count" in attributes:
            counts = np.atleast_1d(attributes["action_count"])
            declared = int(counts[0]) if len(counts) == 1 else tuple(int(c) for c in counts)
        bounds = self._settings.action_bounds
        if bounds is None and "action_low" in attributes and "action_high" in attributes:
            bounds = (float(np.min(attributes["action_low"])), float(np.max(attributes["action_high"])))
        highest = None
        if declared is None and actions.dtype.kind != "f":
            with reading(self._path, "actions"):
                ids = actions[()].reshape(self.n_steps, -1)
            highest = tuple(int(h) for h in ids.max(0))
        self._kind: ActionKind = action_kind(
            self._path, actions.shape[1:], actions.dtype, declared, bounds, highest, self.findings
        )
        self.action = Space(shape=self._kind.shape, dtype=actions.dtype.name)

    def _check_rule(self) -> None:
        """Refuse a file whose episode ends nobody knows."""
        if self._flagged:
            return
        if self._settings.timeouts == "ignore" and "timeouts" in self._arrays:
            self._note("timeouts-ignored", "'timeouts' are ignored, as asked.")
        else:
            self._note("no-timeouts", "there are no 'timeouts'.")
        if "next_observations" in self._arrays or self._settings.max_episode_steps:
            return
        if not self._flags("terminals", slice(self.n_steps - 1, self.n_steps))[0]:
            raise self._refuse(
                "no-rule",
                "there are no 'timeouts' and no 'next_observations', and the last row is no terminal: terminals alone "
                "do not explain where episodes end. Say after how many steps the recording was cut: max_episode_steps.",
            )

    def _read_metadata(self, found: Mapping[str, h5py.Dataset]) -> dict[str, JsonValue]:
        kept = {key: text_of(value) for key, value in self._file.attrs.items()}
        for key, array in found.items():
            if key not in KNOWN and array.shape == ():
                with reading(self._path, key):
                    kept[key] = text_of(array[()])
        return kept

    # ------------------------------------------------------------ rows

    def _slices(self) -> Iterator[slice]:
        """Slices of whole chunks, of about SLICE_BYTES."""
        chunk = max([array.chunks[0] for array in self._arrays.values() if array.chunks] or [1])
        row = sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in self._arrays.values())
        rows = max(1, SLICE_BYTES // row // chunk) * chunk
        for start in range(0, self.n_steps, rows):
            yield slice(start, min(start + rows, self.n_steps))

    def _read(self, rows: slice) -> _Rows:
        actions = self._values("actions", rows)
        return _Rows(
            observations=self._observations("observations", rows),
            actions=self._kind.deliver(actions),
            rewards=self._values("rewards", rows).reshape(-1).astype(np.float32, copy=False)
            if "rewards" in self._arrays
            else None,
            terminals=self._flags("terminals", rows),
            timeouts=self._flags("timeouts", rows) if self._flagged else np.zeros(rows.stop - rows.start, bool),
            next_observations=self._observations("next_observations", rows)
            if "next_observations" in self._arrays
            else None,
        )

    def _values(self, key: str, rows: slice) -> np.ndarray:
        with reading(self._path, key):
            values: np.ndarray = self._arrays[key][rows]
        return values

    def _observations(self, key: str, rows: slice) -> np.ndarray:
        values = self._values(key, rows)
        values = values.reshape(len(values), *self.observation.shape)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(
                values, np.float32 if values.dtype.kind == "f" else values.dtype.newbyteorder("=")
            )

    def _flags(self, key: str, rows: slice) -> np.ndarray:
        values = self._values(key, rows).reshape(-1)
        if values.dtype.kind == "b":
            return values
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            raise self._refuse(
                "flag", f"'{key}' is {values[wrong[0]]} at row {rows.start + wrong[0]:,}: flags are 0 or 1."
            )
        return values == 1

    # ------------------------------------------------------------ episodes

    def blocks(self) -> Iterator[Block]:
        """All episodes, cut by the rules of this module."""
        self._assembler = EpisodeAssembler(self._kind)
        previous: _Rows | None = None
        for rows in self._slices():
            part = self._read(rows)
            if previous is not None:
                yield from self._cut(previous, part.observations[0])
            previous = part
        assert previous is not None
        yield from self._cut(previous, None)

    def _cut(self, part: _Rows, following: np.ndarray | None) -> Iterator[Block]:
        n = len(part.terminals)
        end = part.terminals | part.timeouts
        if part.next_observations is not None:
            jump = np.zeros(n, bool)
            after = (
                part.observations[1:] if following is None else np.concatenate([part.observations[1:], following[None]])
            )
            jump[: len(after)] = ~np.isclose(part.next_observations[: len(after)], after, equal_nan=True).all(
                tuple(range(1, after.ndim))
            )
            end |= jump
        ends = np.flatnonzero(end)
        finals = part.observations[ends] if part.next_observations is None else part.next_observations[ends]
        unfinished = following is None and not end[-1]
        stop = n - 1 if unfinished and part.next_observations is None else n
        block = self._assembler.add(
            part.observations[:stop],
            part.actions[:stop],
            None if part.rewards is None else part.rewards[:stop],
            ends,
            part.terminals[ends],
            part.timeouts[ends] | ~part.terminals[ends],
            finals,
            np.full(len(ends), part.next_observations is not None),
        )
        if block:
            yield block
        if unfinished:
            final = part.observations[-1] if part.next_observations is None else part.next_observations[-1]
            block = self._assembler.close(final)
            if block:
                yield block

    # ------------------------------------------------------------ findings

    def _note(self, code: str, message: str, severity: Severity = Severity.NOTE, count: int = 1) -> None:
        self.findings.append(Finding(code=code, severity=severity, message=message, count=count))

    def _refuse(self, code: str, message: str) -> Refused:
        finding = Finding(code=code, severity=Severity.ERROR, message=message)
        self.findings.append(finding)
        return Refused(self._path, finding)
