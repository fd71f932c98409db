"""Readers: one file a format. The registry is `AnyReader`; `recognise` picks by content, never by file name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias, get_args

from pydantic import Field

from data.errors import DatasetError
from data.readers.arrays import Arrays
from data.readers.d3rlpy import D3rlpy
from data.readers.d4rl import D4RL
from data.readers.episodes_npz import EpisodesNpz
from data.readers.files import check_readable
from data.readers.hdf5 import HDF5_SIGNATURE, describe_hdf5
from data.readers.lerobot import LeRobot
from data.readers.minari import Minari
from data.readers.reader import Reader
from data.readers.robomimic import Robomimic
from data.readers.table import Table

AnyReader: TypeAlias = Annotated[
    LeRobot | Minari | Robomimic | D3rlpy | D4RL | EpisodesNpz | Arrays | Table,
    Field(discriminator="kind"),
]
READERS: tuple[type[Reader], ...] = get_args(get_args(AnyReader)[0])
"""In the order in which they are tried: the more particular format first."""


def recognise(path: Path) -> Reader:
    """The reader, with default settings, whose format the content of `path` is.

    Raises DatasetError saying what is wrong with the file, or what it holds and which formats were tried.
    """
    check_readable(path)
    for reader in READERS:
        if reader.recognises(path):
            return reader()  # type: ignore[call-arg]
    tried = ", ".join(str(reader.model_fields["kind"].default) for reader in READERS)
    raise DatasetError(f"{path.name}: no known format ({_description(path)}). Tried: {tried}.")


def _description(path: Path) -> str:
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        return f"a folder with {', '.join(names[:8]) or 'nothing in it'}"
    with path.open("rb") as stream:
        head = stream.read(8)
    return describe_hdf5(path) if head == HDF5_SIGNATURE else f"a file that begins with {head!r}"
