"""Arrow and Parquet columns as people have them: read with errors that name the file and the column."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.errors import DatasetError
from data.readers.files import check_readable

ARROW_SIGNATURE, PARQUET_SIGNATURE = b"ARROW1", b"PAR1"

LISTS = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


@contextmanager
def reading_arrow(name: str, what: str) -> Iterator[None]:
    """Turn what pyarrow raises while reading `what` into a DatasetError that names file and column."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DatasetError(f"{name}: {what} cannot be read: the file is damaged ({reason}).") from error


def open_parquet(path: Path, name: str | None = None) -> pq.ParquetFile:
    """Open a Parquet file. name: what to call it. Raises DatasetError if it is missing, not Parquet, or damaged."""
    name = name or path.name
    _check_signature(path, name, PARQUET_SIGNATURE, "Parquet")
    with reading_arrow(name, "its footer"):
        return pq.ParquetFile(path)


def read_arrow(path: Path, name: str | None = None) -> pa.Table:
    """All of an Arrow IPC file. name: what to call it. Raises DatasetError if it is missing, not Arrow, or damaged."""
    name = name or path.name
    _check_signature(path, name, ARROW_SIGNATURE, "Arrow")
    with reading_arrow(name, "its content"), pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        table.validate(full=True)
        for place, field in enumerate(table.schema):
            if pa.types.is_string_view(field.type):
                table = table.set_column(place, field.name, _texts(table.column(place)))
        return table


def _texts(views: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text kept as views, as `large_string`. Arrow's own cast also follows the views of missing values, which nothing
    checks: in a damaged file they lead out of memory. So these are emptied first."""
    chunks = []
    for chunk in views.chunks:
        if chunk.null_count:
            missing, structs, *texts = chunk.buffers()
            rows = np.frombuffer(structs, np.uint8, count=(chunk.offset + len(chunk)) * 16).reshape(-1, 16).copy()
            rows[chunk.offset :][~chunk.is_valid().to_numpy(zero_copy_only=False)] = 0
            buffers = [missing, pa.py_buffer(rows), *texts]
            chunk = pa.Array.from_buffers(chunk.type, len(chunk), buffers, offset=chunk.offset)
        chunks.append(chunk.cast(pa.large_string()))
    return pa.chunked_array(chunks, pa.large_string())


def _check_signature(path: Path, name: str, signature: bytes, format_name: str) -> None:
    check_readable(path, name)
    with path.open("rb") as stream:
        if stream.read(len(signature)) != signature:
            raise DatasetError(f"{name}: not {format_name}: it begins otherwise. Download or make it again.")


def column_values(name: str, key: str, column: pa.ChunkedArray | pa.Array, shape: tuple[int, ...]) -> np.ndarray:
    """[n, *shape] numbers of a column of scalars, or of lists nested or flat.

    name: of the file. Raises DatasetError where a value is missing, no number, or not of the shape.
    """
    with reading_arrow(name, f"'{key}'"):
        values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        n = len(values)
        while True:
            if values.null_count:
                row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) * n // len(values)
                raise DatasetError(f"{name}: '{key}' has no value at row {row:,}. Repair it, or leave the episode out.")
            if not any(is_list(values.type) for is_list in LISTS):
                break
            lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
            if len(lengths) and (lengths != lengths[0]).any():
                row = int(np.flatnonzero(lengths != lengths[0])[0]) * n // len(lengths)
                raise DatasetError(f"{name}: '{key}' has lists of different length, at row {row:,}.")
            values = values.flatten()
        if not any(is_number(values.type) for is_number in NUMBERS):
            raise DatasetError(f"{name}: '{key}' holds {values.type}: expected numbers.")
        numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    if numbers.size != n * math.prod(shape):
        width = numbers.size // n if n else 0
        raise DatasetError(f"{name}: '{key}' has {width:,} numbers a row; expected {math.prod(shape):,} ({shape}).")
    return numbers.reshape(n, *shape)
