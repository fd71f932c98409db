"""Content digests: the same content has the same identity on every machine, whatever file or shard it lay in.

A digest is the first 32 hexadecimal digits (128 bits) of a SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None

DIGITS = 32
BLOCK = 1 << 22


def canonical_json(value: Json) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. Raises ValueError on NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Json) -> str:
    """Digest of a JSON value by its canonical text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:DIGITS]


def digest_of_file(path: Path) -> str:
    """Digest of a file's bytes; of a folder, that of the relative paths and bytes of all files in it."""
    hasher = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            hasher.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                hasher.update(block)
    return hasher.hexdigest()[:DIGITS]


class ColumnHasher:
    """Digest of one array fed in pieces along its first axis; where it was cut makes no difference.

    Bytes are hashed little-endian in row-major order, followed by dtype and shape.
    """

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._rows = 0
        self._kind: tuple[str, tuple[int, ...]] | None = None

    def update(self, rows: np.ndarray) -> None:
        """Add `rows` [n, ...]. Raises ValueError if dtype or row shape differ from the rows before."""
        rows = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
        kind = (rows.dtype.str, rows.shape[1:])
        if self._kind is None:
            self._kind = kind
        elif kind != self._kind:
            raise ValueError(f"rows of {kind} after rows of {self._kind}")
        self._hasher.update(rows.reshape(-1).view(np.uint8).data if rows.size else b"")
        self._rows += len(rows)

    def digest(self) -> str:
        """Digest of all rows so far."""
        final = self._hasher.copy()
        final.update(canonical_json([self._kind and self._kind[0], self._kind and self._kind[1], self._rows]).encode())
        return final.hexdigest()[:DIGITS]
