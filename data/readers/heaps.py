"""HDF5's heaps of text, looked through before HDF5 does: it reads some damaged ones for ever (HDFGroup/hdf5#1707).

Text of variable length lies in collections anywhere in a file: a signature, a size, then objects one after another.
HDF5 steps from object to object by the size each states; where that is zero, it never comes to the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

SIGNATURE = b"GCOL\x01\0\0\0"
HEADER = 16
"""Bytes before the first object of a collection (signature, size), and before each object's own (index, size)."""

PIECE_BYTES = 16 << 20


def check_heaps(path: Path) -> None:
    """Raise ValueError, naming the byte, if HDF5 might not come back from reading text in `path`.

    Reads the whole file, once for the same size and time of change. Sizes are taken to be of 8 bytes.
    """
    stat = path.stat()
    damaged = _first_damaged(path, stat.st_size, stat.st_mtime_ns)
    if damaged is not None:
        raise ValueError(f"its text at byte {damaged:,} has no end")


@lru_cache
def _first_damaged(path: Path, size: int, modified_ns: int) -> int | None:
    with path.open("rb") as file:
        for place in list(_collections(file)):
            file.seek(place + len(SIGNATURE))
            (n_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            file.seek(place)
            if not _comes_to_an_end(file.read(min(n_bytes, size))):
                return place
    return None


def _collections(file: BinaryIO) -> Iterator[int]:
    """Where collections begin."""
    start, block = 0, b""
    while piece := file.read(PIECE_BYTES):
        kept = block[-(len(SIGNATURE) - 1) :]  # a signature may lie across two pieces
        start += len(block) - len(kept)
        block = kept + piece
        place = block.find(SIGNATURE)
        while place >= 0:
            yield start + place
            place = block.find(SIGNATURE, place + 1)


def _comes_to_an_end(collection: bytes) -> bool:
    place = HEADER
    while place + HEADER <= len(collection):
        index, n_bytes = struct.unpack_from("<H6xQ", collection, place)
        step = n_bytes if index == 0 else HEADER + -(-n_bytes // 8) * 8  # index 0 is free room, header and all
        if not 0 < step <= len(collection) - place:
            return False
        place += step
    return True
