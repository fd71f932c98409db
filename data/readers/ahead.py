"""Reading ahead: the next piece is made in another thread while this one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces, one of them made ahead. Unpacking, hashing and writing release the interpreter, so they overlap.

    What `pieces` raises is raised here, at its place. One piece more is in memory.
    """
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = thread.submit(next, pieces, None)
            yield piece
