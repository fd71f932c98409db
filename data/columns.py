"""One array in one Arrow IPC file: written in one record batch, mapped and read without a copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from data.errors import StoreError
from data.trajectories import Column


def row_bytes(column: Column) -> int:
    """Bytes of one row."""
    return int(column.dtype.itemsize * np.prod(column.shape[1:], dtype=np.int64))


def write(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Write the rows of `parts`, each [n, ...], to a new file: fixed-size lists for rows with an axis.

    The shape of a row is kept in the schema, since Arrow's lists have one axis.
    """
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    flat = np.ascontiguousarray(rows).reshape(-1)
    # From the buffer, since pa.array(numpy) imports pandas.
    values = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    column = values if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, int(np.prod(rows.shape[1:])))
    schema = pa.schema([pa.field("value", column.type, nullable=False)], {"shape": json.dumps(rows.shape[1:])})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))


def read(path: Path) -> np.ndarray:
    """[n, ...] read-only, mapped from disk. Raises StoreError, naming the file, if it is not whole."""
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        (column,) = file.get_batch(0).columns
        shape = tuple(json.loads(file.schema.metadata[b"shape"]))
        values = (column.flatten() if shape else column).to_numpy(zero_copy_only=True)
        rows: np.ndarray = values.reshape(-1, *shape)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is not a whole column file: {error}") from error
    return rows


def read_table(path: Path) -> pl.DataFrame:
    """A small table, in memory. Raises StoreError, naming the file, if it is not whole."""
    try:
        return pl.read_ipc(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StoreError(f"{path} is not a whole table: {error}") from error
