"""One array in one Arrow IPC file: written in one record batch, mapped and read without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from data.digests import canonical_json
from data.errors import StoreError
from data.trajectories import Column


def row_bytes(column: Column) -> int:
    """Bytes of one row."""
    return int(column.dtype.itemsize * np.prod(column.shape[1:], dtype=np.int64))


def write(path: Path, rows: np.ndarray) -> None:
    """Write `rows` [n, ...] to a new file: fixed-size lists for rows with an axis, their shape in the schema."""
    values = pa.array(rows.reshape(-1))
    column = values if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, int(np.prod(rows.shape[1:])))
    schema = pa.schema([pa.field("value", column.type, nullable=False)], {"shape": canonical_json(rows.shape[1:])})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))


def read(path: Path) -> np.ndarray:
    """[n, ...] read-only, mapped from disk. Raises StoreError, naming the file, if it is not whole."""
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        (column,) = file.get_batch(0).columns
        shape = tuple(int(n) for n in file.schema.metadata[b"shape"].decode().strip("[]").split(",") if n)
        values = column.flatten() if shape else column
        return values.to_numpy(zero_copy_only=True).reshape(-1, *shape)  # type: ignore[no-any-return]
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is not a whole column file: {error}") from error
