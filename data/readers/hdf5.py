"""HDF5 files as people have them: opened, listed and read with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from pydantic import JsonValue

from data.errors import DatasetError
from data.readers.files import check_readable
from data.readers.heaps import check_heaps

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"

CHUNK_CACHE = 64 << 20
"""Bytes of decompressed chunks kept for each array, so that slices not aligned with chunks unpack no chunk twice."""


def is_hdf5(path: Path) -> bool:
    """Whether `path` is a file that begins as HDF5 does."""
    if path.is_dir():
        return False
    with path.open("rb") as stream:
        return stream.read(8) == HDF5_SIGNATURE


def open_hdf5(path: Path) -> h5py.File:
    """Open for reading. Raises DatasetError if the file is missing, not HDF5, or cut short."""
    check_readable(path)
    if path.is_dir():
        raise DatasetError(f"{path.name}: a folder; expected an HDF5 file.")
    with path.open("rb") as stream:
        if stream.read(8) != HDF5_SIGNATURE:
            raise DatasetError(f"{path.name}: not an HDF5 file.")
    try:
        return h5py.File(path, "r", rdcc_nbytes=CHUNK_CACHE)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        if "truncated file" in str(error):
            raise DatasetError(
                f"{path.name}: cut short: it has {path.stat().st_size:,} bytes and says it should have more. "
                "Download or copy it again."
            ) from error
        raise DatasetError(f"{path.name}: damaged HDF5, it cannot be opened ({_brief(error)}).") from error


@contextmanager
def reading(path: Path, key: str) -> Iterator[None]:
    """Turn what h5py raises while reading `key` into a DatasetError that names file and key."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise DatasetError(f"{path.name}: '{key}' cannot be read: the file is damaged ({_brief(error)}).") from error


def arrays(file: h5py.File, path: Path) -> dict[str, h5py.Dataset]:
    """Every array in the file by its full key, in alphabetic order; bytes that are no text as `\\xff`."""
    found: dict[str, h5py.Dataset] = {}

    def visit(key: str | bytes, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset):
            found[_name(key)] = item

    with reading(path, "/"):
        file.visititems(visit)
    return found


def names(group: h5py.Group) -> list[str]:
    """Names in a group, in the file's order; bytes that are no text as `\\xff`."""
    return [_name(name) for name in group]


def check_array(path: Path, key: str, array: h5py.Dataset) -> None:
    """Raise DatasetError unless the array's values are all in the file and can be unpacked here.

    HDF5 gives zeros for values that were never written (a writer that was stopped), without a word.
    """
    with reading(path, key):
        properties = array.id.get_create_plist()
        filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
        elsewhere = array.is_virtual or array.external is not None
        if array.chunks is None:
            wanted, there, unit = array.nbytes, array.id.get_storage_size(), "bytes"
        else:
            wanted = math.prod(-(-n // chunk) for n, chunk in zip(array.shape, array.chunks, strict=True))
            there, unit = array.id.get_num_chunks(), "chunks"
    for code in filters:
        if not h5py.h5z.filter_avail(code):
            raise DatasetError(
                f"{path.name}: '{key}' is packed with filter {code}, which is not available here. "
                "Unpack it with h5repack, or install the filter (hdf5plugin)."
            )
    if there < wanted and not elsewhere:
        raise DatasetError(
            f"{path.name}: '{key}' of shape {array.shape} has only {there:,} of {wanted:,} {unit} in the file: the "
            "rest was never written. Make it again."
        )


def attributes_of(holder: h5py.File | h5py.Group) -> dict[str, JsonValue]:
    """All attributes of a file or group as JSON. Call it within `reading`."""
    if any(holder.attrs.get_id(key).dtype.kind == "O" for key in holder.attrs):
        check_heaps(Path(holder.file.filename))
    return {str(text_of(key)): text_of(value) for key, value in holder.attrs.items()}


def value_of(array: h5py.Dataset) -> JsonValue:
    """All of an array, or a scalar, as JSON. Call it within `reading`."""
    if isinstance(array, h5py.Dataset) and array.dtype.kind == "O":
        check_heaps(Path(array.file.filename))
    return text_of(array[()])


def text_of(value: object) -> JsonValue:
    """A scalar attribute or array as JSON: text stays text, whatever way it was stored, and damaged text is marked."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return [text_of(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        return text_of(value.item())
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, (int, float, bool)):
        return value if not isinstance(value, float) or np.isfinite(value) else str(value)
    return str(value)


def describe_hdf5(path: Path) -> str:
    """What an HDF5 file holds, in one phrase. Raises DatasetError if it cannot be opened."""
    with open_hdf5(path) as file:
        keys = list(arrays(file, path))
    if not keys:
        return "an HDF5 file without any arrays; looked for observations, actions, terminals"
    return f"an HDF5 file with {', '.join(keys[:12])}{' and more' if len(keys) > 12 else ''}"


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _name(name: str | bytes) -> str:
    """h5py gives names that are not UTF-8, as in a damaged file, as bytes."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
