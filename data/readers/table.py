"""Step tables: Parquet, Arrow (IPC file) or CSV with one row a step, in any order, and columns of any name.

Which column is what is said by the settings or seen by usual names, and is on record: `episode`, `run`; `step`, `t`;
`obs_0`, `x0`, or one column of lists `obs`; `action_0`, `u0`, or `action`; `reward`; `terminated` and `truncated`, or
one column `end` of words or `done` of flags. Episodes are read in the order of their names, numbers in them by value
(`run-2` before `run-10`), and their rows in the order of `step`, which must count every step of an episode once.

The observation after an episode's last step is known if the table has one more row for it, whose actions are empty.
Other empty cells are NaN; an empty flag is no flag.

Parquet is read a row group at a time if its rows are in order, and Arrow is mapped. CSV, and the columns that are read
of any table whose rows have to be sorted, must fit in memory.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from data.config import Config
from data.errors import DatasetError
from data.findings import Severity
from data.readers.arrow import ARROW_SIGNATURE, LISTS, NUMBERS, PARQUET_SIGNATURE, column_values
from data.readers.files import natural
from data.readers.observations import PLAIN
from data.readers.reader import Reader, RefusedError, Space
from data.readers.recorded import PLACES, Episode, RecordedSource
from data.readers.table_rows import TableRows, csv_header

EPISODE = ("episode", "episode_id", "episode_index", "trajectory", "trajectory_id", "traj_id", "run", "run_id")
STEP = ("step", "step_id", "step_index", "timestep", "time_step", "t")
OBSERVATIONS = ("observation", "observations", "obs", "state", "states", "x", "s")
ACTIONS = ("action", "actions", "act", "u", "a")
REWARD = ("reward", "rewards")
TERMINATED = ("terminated", "terminal", "terminals", "termination", "terminations")
TRUNCATED = ("truncated", "truncation", "truncations", "timeout", "timeouts")
"""Usual names. Those of observations and actions may be followed by a number, of which there is one a dimension."""

END, DONE = "end", "done"
SCALAR = Space(shape=(), dtype="float64")
NO_END = ("", "0", "false")


class End(Config):
    """A column that says in an episode's last row how it ended, and elsewhere nothing, 0 or false.

    terminated, truncated: the values that mean so, as text in small letters.
    """

    column: str
    terminated: tuple[str, ...] = ("terminated", "terminal", "crash")
    truncated: tuple[str, ...] = ("truncated", "timeout", "limit")


class Table(Reader):
    """Reads step tables.

    episode, step, reward, terminated, truncated: names of columns; by default those with usual names. Without a step
        column, the rows of an episode are taken as they come. terminated, truncated: columns of flags.
    observations, actions: names of columns, or patterns (`obs*`) that match some, in the order of their numbers.
    end: a column of words in place of flags.
    """

    kind: Literal["table"] = "table"
    episode: str | None = None
    step: str | None = None
    observations: tuple[str, ...] | None = Field(default=None, min_length=1)
    actions: tuple[str, ...] | None = Field(default=None, min_length=1)
    reward: str | None = None
    terminated: str | None = None
    truncated: str | None = None
    end: End | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.end and (self.terminated or self.truncated):
            raise ValueError("give either `end`, or `terminated` and `truncated`")
        return self

    def open(self, path: Path) -> TableSource:
        return TableSource(self, path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return False
        with path.open("rb") as stream:
            head = stream.read(len(ARROW_SIGNATURE))
        return head.startswith((ARROW_SIGNATURE, PARQUET_SIGNATURE)) or csv_header(path) is not None


class TableSource(RecordedSource):
    """An opened table."""

    format = "table"

    def __init__(self, settings: Table, path: Path) -> None:
        super().__init__(path)
        self._settings = settings
        self._rows = TableRows(path)
        self._n_empty = 0
        self._schema = self._rows.schema
        self.metadata = {}
        self._find_columns()
        self._place_rows()
        self._understand_ends()
        self._understand_observations(self._observation[1], None)
        self._understand_actions(settings, self._action[1].shape, np.dtype(self._action[1].dtype))

    def close(self) -> None:
        """A mapped file is closed with the last piece of it."""

    # ------------------------------------------------------------ which column is what

    def _find_columns(self) -> None:
        settings = self._settings
        episode = self._named("episode", settings.episode, EPISODE)
        if episode is None:
            raise self._unsaid("which column names the episode", "episode")
        self._episode_column, self._step_column = episode, self._named("step", settings.step, STEP)
        self._observation = self._several("observations", settings.observations, OBSERVATIONS)
        self._action = self._several("actions", settings.actions, ACTIONS)
        self._reward = self._named("reward", settings.reward, REWARD)
        if self._reward is not None:
            self._space([self._reward], "reward")
        self._flag_columns = {
            "terminated": self._named("terminated", settings.terminated, () if settings.end else TERMINATED),
            "truncated": self._named("truncated", settings.truncated, () if settings.end else TRUNCATED),
        }
        self._end = settings.end
        if not any(self._flag_columns.values()) and self._end is None:
            if END in self._schema.names:
                self._end = End(column=END)
            elif DONE in self._schema.names:
                self._end = End(column=DONE, terminated=(), truncated=("1", "true"))
        taken: dict[str, Sequence[str | None]] = {
            "episode": [episode],
            "step": [self._step_column],
            "observations": self._observation[0],
            "actions": self._action[0],
            "reward": [self._reward],
            **{role: [column] for role, column in self._flag_columns.items()},
            "end": [self._named("end", self._end.column, ()) if self._end else None],
        }
        said = {role: [column for column in columns if column] for role, columns in taken.items()}
        self._note("columns", "; ".join(f"{role}: {', '.join(columns)}" for role, columns in said.items() if columns))
        others = [name for name in self._schema.names if not any(name in columns for columns in said.values())]
        if others:
            self._note("other-keys", f"columns not used: {', '.join(others)}.", count=len(others))

    def _named(self, role: str, given: str | None, usual: Sequence[str]) -> str | None:
        """The column for a role: the given one, or the only one with a usual name."""
        names = self._schema.names
        if given is not None:
            if given not in names:
                raise self._refuse("missing-key", f"{role}: there is no column '{given}'; {self._present()}.")
            return given
        found = [name for name in names if name.lower() in usual]
        if len(found) > 1:
            raise self._unsaid(f"which of {', '.join(found)} is meant", role)
        return found[0] if found else None

    def _several(self, role: str, given: Sequence[str] | None, usual: Sequence[str]) -> tuple[Sequence[str], Space]:
        """The columns of observations or actions, and the space they make: the given ones, or the only usual family."""
        columns = self._family(role, usual) if given is None else self._matching(role, given)
        return columns, self._space(columns, role)

    def _family(self, role: str, usual: Sequence[str]) -> list[str]:
        names = sorted(self._schema.names, key=natural)
        stem_of = {name: re.sub(r"[._\[]?\d+\]?$", "", name.lower()) for name in names}
        families = [[name for name in names if stem_of[name] == stem] for stem in usual]
        families = [family for family in families if family]
        if len(families) != 1:
            which = " or ".join(family[0] + ", ..." * (len(family) > 1) for family in families)
            raise self._unsaid(f"which columns are {role}{f' ({which})' if which else ''}", role)
        return families[0]

    def _matching(self, role: str, given: Sequence[str]) -> list[str]:
        names = sorted(self._schema.names, key=natural)
        columns: list[str] = []
        for pattern in given:
            found = [pattern] if pattern in names else fnmatch.filter(names, pattern)
            if not found:
                raise self._refuse("missing-key", f"{role}: no column is '{pattern}'; {self._present()}.")
            columns += found
        twice = {column for column in columns if columns.count(column) > 1}
        if twice:
            raise self._refuse("column-twice", f"{role}: '{min(twice)}' is named twice.")
        return columns

    def _unsaid(self, what: str, role: str) -> DatasetError:
        return self._refuse(
            "unknown-columns", f"{what} is not clear: say so with the setting {role}; {self._present()}."
        )

    def _present(self) -> str:
        return f"columns present: {', '.join(self._schema.names)}"

    def _space(self, columns: Sequence[str], role: str) -> Space:
        """Of one observation or action: one number a column, or one column of lists."""
        types = [self._schema.field(column).type for column in columns]
        if len(types) == 1 and any(is_list(types[0]) for is_list in LISTS):
            first = next((value for value in self._rows.read(columns).column(0) if value.is_valid), None)
            shape = np.shape(first.as_py()) if first is not None else ()
            while any(is_list(types[0]) for is_list in LISTS):
                types = [types[0].value_type]
        else:
            shape = (len(types),) if len(types) > 1 or role == "observations" else ()
        for column, kind in zip(columns, types, strict=True):
            if not any(is_number(kind) for is_number in NUMBERS):
                raise self._refuse("dtype", f"'{column}' holds {kind}: expected numbers. Choose others with {role}.")
        dtype = np.result_type(*(np.dtype(kind.to_pandas_dtype()) for kind in types))
        return Space(shape=shape, dtype=dtype.name)

    # ------------------------------------------------------------ order and ends

    def _place_rows(self) -> None:
        """Sort rows by episode and step, and see that each step of an episode is there once."""
        keys = self._rows.read([self._episode_column, *filter(None, [self._step_column]), self._action[0][0]])
        if not len(keys):
            raise self._refuse("no-steps", "no steps: the table has no rows.")
        encoded = self._keys(keys, self._episode_column).dictionary_encode()
        names = encoded.dictionary.to_pylist()
        rank_of = np.empty(len(names), np.int64)
        rank_of[sorted(range(len(names)), key=lambda code: natural(names[code]))] = np.arange(len(names))
        rank = rank_of[encoded.indices.to_numpy()]
        if self._step_column is None:
            step = np.arange(len(rank))
            self._note("no-step-column", "no column counts the steps: the rows of an episode are taken as they come.")
        else:
            step = self._whole(keys, self._step_column)
        order = np.lexsort((step, rank))
        rank, step = rank[order], step[order]
        self._names = sorted((str(name) for name in names), key=natural)
        self._bounds = np.searchsorted(rank, np.arange(len(names) + 1))
        if self._step_column is not None:
            self._check_steps(order, rank, step)
        self._order = None if (order[1:] > order[:-1]).all() else order
        if self._order is not None:
            self._note("rows-sorted", "the rows are in another order: sorted by episode and step.")
        last = order[self._bounds[1:] - 1]
        self._has_final = keys.column(self._action[0][0]).is_null().to_numpy()[last]
        self.n_steps = len(order) - int(self._has_final.sum())

    def _check_steps(self, order: np.ndarray, rank: np.ndarray, step: np.ndarray) -> None:
        same, gap = rank[1:] == rank[:-1], np.diff(step)
        if (gap == 1).all():
            return
        starts = step[self._bounds[:-1]]
        twice = np.flatnonzero(same & (gap == 0))
        holes = np.flatnonzero(same & (gap > 1))
        late = np.flatnonzero(starts > starts.min())
        repeated = [
            f"episode {self._names[rank[i]]}, step {step[i]} (rows {order[i]:,} and {order[i + 1]:,})" for i in twice
        ]
        missing = [f"episode {self._names[e]}, step {starts.min()}" for e in late]
        missing += [f"episode {self._names[rank[i]]}, step {step[i] + 1}" for i in holes]
        problems = {
            "steps are there twice": ("repeated-steps", repeated),
            "steps are missing": ("missing-steps", missing),
        }
        for what, (code, places) in problems.items():
            if places:
                more = f" and {len(places) - PLACES:,} more" if len(places) > PLACES else ""
                message = f"{what} ('{self._step_column}'): {'; '.join(places[:PLACES])}{more}. Repair the table."
                self._note(code, message, Severity.ERROR, len(places))
        if twice.size or missing:
            raise RefusedError(self._path, self.findings)

    def _understand_ends(self) -> None:
        columns = [column for column in self._flag_columns.values() if column]
        if self._end is not None:
            known = {*self._end.terminated, *self._end.truncated, *NO_END}
            values = set(pc.unique(_words(self._rows.read([self._end.column]).column(0))).to_pylist())
            unknown = sorted(values - known)
            if unknown:
                raise self._refuse(
                    "unknown-ends",
                    f"'{self._end.column}' holds {', '.join(map(repr, unknown[:PLACES]))}: how such episodes ended is "
                    f"not known. Say it: end: {{column: {self._end.column}, terminated: [...], truncated: [...]}}.",
                )
            said = [
                f"{', '.join(words)} as {kind}"
                for kind in ("terminated", "truncated")
                if (words := [word for word in getattr(self._end, kind) if word in values])
            ]
            advice = "" if self._settings.end else " If that is wrong, say so with the setting end."
            self._note("ends-taken", f"'{self._end.column}': {'; '.join(said) or 'no episode ends'}.{advice}")
        elif not columns:
            self._note(
                "ends-taken",
                "nothing marks how episodes ended: taken as truncated. Name a column that does with terminated, "
                "truncated or end.",
            )
        for column in columns:
            if not any(is_number(self._schema.field(column).type) for is_number in NUMBERS):
                raise self._refuse("flag", f"'{column}' holds {self._schema.field(column).type}: flags are 0 or 1.")
            wrong = set(pc.unique(self._rows.read([column]).column(0)).to_pylist()) - {0, 1, None}
            if wrong:
                raise self._refuse("flag", f"'{column}' is {min(wrong)} in some row: flags are 0 or 1.")

    def _keys(self, table: pa.Table, column: str) -> pa.Array:
        """A column of names or whole numbers, without gaps."""
        values = table.column(column).combine_chunks()
        if values.null_count:
            row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise self._refuse("missing-value", f"'{column}' is empty at row {row:,}: every row needs one.")
        if not pa.types.is_floating(values.type):
            return values
        numbers = values.to_numpy()
        wrong = np.flatnonzero(numbers != np.rint(numbers))
        if len(wrong):
            raise self._refuse(
                "not-whole", f"'{column}' is {numbers[wrong[0]]} at row {wrong[0]:,}: expected whole numbers."
            )
        return values.cast(pa.int64())

    def _whole(self, table: pa.Table, column: str) -> np.ndarray:
        values = self._keys(table, column)
        if not pa.types.is_integer(values.type):
            raise self._refuse("not-whole", f"'{column}' holds {values.type}: expected whole numbers that count steps.")
        whole: np.ndarray = values.to_numpy().astype(np.int64)
        return whole

    # ------------------------------------------------------------ episodes

    def _tables(self) -> Iterator[tuple[str, pa.Table]]:
        """The rows of each episode with its name, in order."""
        single = [self._reward, *self._flag_columns.values(), self._end.column if self._end else None]
        columns = list(dict.fromkeys([*self._observation[0], *self._action[0], *(key for key in single if key)]))
        batches = self._rows.batches(columns)
        if self._order is not None:
            batches = iter(self._rows.read(columns).take(self._order).to_batches())
        parts: list[pa.RecordBatch] = []
        before = 0  # rows in the batches before this one
        ends = iter(zip(self._names, self._bounds[1:].tolist(), strict=True))
        name, end = next(ends)
        for batch in batches:
            start = 0
            while end <= before + len(batch):
                parts.append(batch.slice(start, end - before - start))
                yield name, pa.Table.from_batches(parts)
                parts, start = [], end - before
                name, end = next(ends, ("", before + len(batch) + 1))
            parts.append(batch.slice(start))
            before += len(batch)

    def _actions(self) -> Iterator[np.ndarray]:
        for (name, table), has_final in zip(self._tables(), self._has_final, strict=True):
            yield self._values(table.slice(0, len(table) - int(has_final)), *self._action, name)

    def _episodes(self) -> Iterator[Episode]:
        for (name, table), has_final in zip(self._tables(), self._has_final, strict=True):
            steps = table.slice(0, len(table) - int(has_final))
            for column in self._action[0] if has_final else []:
                if table.column(column)[-1].is_valid:
                    raise self._wrong(name, f"its last row has '{column}' and no '{self._action[0][0]}'")
            terminations, truncations = self._flags(table, len(steps))
            yield Episode(
                name=f"episode {name}",
                observations={PLAIN: self._values(table, *self._observation, name)},
                actions=self._values(steps, *self._action, name),
                rewards=self._values(steps, [self._reward], SCALAR, name) if self._reward else None,
                terminations=terminations,
                truncations=truncations,
            )
        if self._n_empty:
            self._note(
                "empty-cells", f"{self._n_empty:,} empty cells are read as NaN.", Severity.WARNING, self._n_empty
            )

    def _values(self, table: pa.Table, columns: Sequence[str], space: Space, episode: str) -> np.ndarray:
        """[T, *shape] numbers of an episode, from one column each, or from one column of lists."""
        where = f"{self._path.name}: episode {episode}"
        if len(space.shape) > 1 or any(is_list(table.schema.field(columns[0]).type) for is_list in LISTS):
            return column_values(where, columns[0], table.column(columns[0]), space.shape)
        for column in columns:
            empty = table.column(column).null_count
            if empty and not pa.types.is_floating(table.schema.field(column).type):
                step = int(np.flatnonzero(table.column(column).is_null().to_numpy())[0])
                raise self._wrong(episode, f"'{column}' is empty at step {step:,}")
            self._n_empty += empty
        values = np.stack([table.column(column).to_numpy() for column in columns], axis=1)
        return values.reshape(len(values), *space.shape)

    def _flags(self, table: pa.Table, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Terminations and truncations [T]. A flag in the row of the final observation is one of the last step."""
        if self._end is not None:
            words = np.array(_words(table.column(self._end.column)).to_pylist())
            rows = [np.isin(words, values) for values in (self._end.terminated, self._end.truncated)]
        elif any(self._flag_columns.values()):
            rows = [
                np.zeros(len(table), bool)
                if column is None
                else pc.fill_null(table.column(column).cast(pa.float64()), 0).to_numpy() == 1
                for column in self._flag_columns.values()
            ]
        else:
            rows = [np.zeros(len(table), bool), np.arange(len(table)) == len(table) - 1]
        for flags in rows:
            flags[n_steps - 1] |= flags[-1]
        terminations, truncations = (flags[:n_steps] for flags in rows)
        return terminations, truncations

    def _wrong(self, episode: str, message: str) -> DatasetError:
        return DatasetError(f"{self._path.name}: episode {episode}: {message}. Repair it, or leave the episode out.")


def _words(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as text in small letters, empty where there is no value."""
    return pc.utf8_lower(pc.fill_null(column.cast(pa.large_string()), ""))
