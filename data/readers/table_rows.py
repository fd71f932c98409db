"""Where the rows of a table are: Parquet, an Arrow file or CSV, with one way to read columns of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DatasetError
from data.readers.arrow import ARROW_SIGNATURE, PARQUET_SIGNATURE, open_parquet, read_arrow, reading_arrow
from data.readers.files import check_readable

ROWS = 1 << 13
"""So many rows are unpacked at a time."""

SEPARATORS = ",;\t"


class TableRows:
    """An opened table.

    schema: names and types of its columns; texts are `large_string`, however the file keeps them.
    """

    def __init__(self, path: Path) -> None:
        """Raises DatasetError if the file is missing, of no known format, or damaged."""
        check_readable(path)
        if path.is_dir():
            raise DatasetError(f"{path.name}: a folder; expected a file with one row a step.")
        self._name = path.name
        self._rows: pa.Table | pq.ParquetFile
        with path.open("rb") as stream:
            head = stream.read(len(ARROW_SIGNATURE))
        if head.startswith(PARQUET_SIGNATURE):
            self._rows = open_parquet(path)
            schema = self._rows.schema_arrow
        else:
            self._rows = read_arrow(path) if head.startswith(ARROW_SIGNATURE) else _read_csv(path)
            schema = self._rows.schema
        self.schema: pa.Schema = pa.schema([(field.name, _plain(field.type)) for field in schema])

    def read(self, columns: Sequence[str]) -> pa.Table:
        """All rows of some columns."""
        with reading_arrow(self._name, ", ".join(f"'{column}'" for column in columns)):
            rows = self._rows if isinstance(self._rows, pa.Table) else self._rows.read(columns=list(columns))
            return rows.select(list(columns)).cast(self._part(columns))

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows of some columns in pieces, in the order of the file. Holds one row group of Parquet at a time."""
        with reading_arrow(self._name, "its rows"):
            for rows in self._groups(list(columns)):
                for piece in rows.select(list(columns)).to_batches(max_chunksize=ROWS):
                    yield piece.cast(self._part(columns))

    def _groups(self, columns: list[str]) -> Iterator[pa.Table]:
        """Not by ParquetFile.iter_batches: it keeps every row group that it has read until the last."""
        if isinstance(self._rows, pa.Table):
            yield self._rows
            return
        for group in range(self._rows.num_row_groups):
            yield self._rows.read_row_group(group, columns=columns)

    def _part(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([self.schema.field(column) for column in columns])


def _plain(kind: pa.DataType) -> pa.DataType:
    """Arrow can do little with views and categories."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.large_string() if pa.types.is_string_view(kind) or pa.types.is_string(kind) else kind


def csv_header(path: Path) -> tuple[list[str], str] | None:
    """The column names in the first line of a text file, and what separates them; None if there are no two names."""
    with path.open("rb") as stream:
        line = stream.readline(1 << 20)
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    separator = max(SEPARATORS, key=text.count)
    try:
        names = [name.strip() for name in _cells(text, separator)]
    except csv.Error:
        return None
    if len(names) < 2 or len(set(names)) < len(names) or not all(name.isprintable() for name in names):
        return None
    return (names, separator) if all(name[:1].isalpha() or name[:1] in ("_", "") for name in names) else None


def _read_csv(path: Path) -> pa.Table:
    header = csv_header(path)
    if header is None:
        raise DatasetError(
            f"{path.name}: no table: expected Parquet, an Arrow IPC file, or text whose first line names the columns."
        )
    names, separator = header
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - (1 << 20)))
        last = stream.read().rstrip(b"\r\n").rsplit(b"\n", 1)[-1].decode("utf-8", "replace")
    try:
        n_cells = len(_cells(last, separator))
    except csv.Error as error:
        raise DatasetError(f"{path.name}: its last line is damaged ({error}). Download or make it again.") from error
    if n_cells < len(names):
        raise DatasetError(
            f"{path.name}: cut short: its last line has {n_cells} of {len(names)} columns. Download or make it again."
        )
    try:
        table = pl.read_csv(path, separator=separator, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DatasetError(f"{path.name}: cannot be read as CSV ({reason}). Download or make it again.") from error
    return table.to_arrow(compat_level=pl.CompatLevel.oldest())


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader(io.StringIO(line), delimiter=separator), [])
