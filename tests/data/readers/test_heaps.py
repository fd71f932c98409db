"""Text that HDF5 would read for ever is refused, and sound text is not."""

from __future__ import annotations

import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from data.errors import DatasetError
from data.readers import heaps
from data.readers.hdf5 import attributes_of, open_hdf5, reading, value_of
from data.readers.heaps import SIGNATURE, check_heaps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with text of many lengths in attributes and arrays, some of it deleted and written again."""
    with h5py.File(tmp_path / "texts.hdf5", "w") as file:
        file.attrs["maker"] = "somebody"
        file["notes"] = ["x" * n for n in range(300)]
        file["numbers"] = np.arange(1000)
        file["long"] = "y" * 100_000
        del file["notes"]
        file["notes"] = ["z" * n for n in range(1, 40)]
    return tmp_path / "texts.hdf5"


def first_collection(path: Path) -> int:
    return path.read_bytes().index(SIGNATURE)


@pytest.mark.parametrize("piece", [1, 7, 64, 16 << 20])
def test_sound_text_is_read(path, monkeypatch, piece):
    monkeypatch.setattr(heaps, "PIECE_BYTES", piece)
    with path.open("rb") as file:
        found = list(heaps._collections(file))
    content = path.read_bytes()
    assert found == [i for i in range(len(content)) if content.startswith(SIGNATURE, i)] and len(found) > 2
    heaps._first_damaged.cache_clear()
    check_heaps(path)
    with open_hdf5(path) as file:
        assert attributes_of(file) == {"maker": "somebody"} and value_of(file["notes"])[:2] == ["z", "zz"]


@pytest.mark.parametrize("size", [0, 2**64 - 16, 1 << 40], ids=["zero", "wraps to zero", "beyond the collection"])
def test_a_size_that_leads_nowhere_is_refused_by_key_and_byte(path, size):
    content = bytearray(path.read_bytes())
    at = first_collection(path)
    index = 0 if size == 0 else 1
    struct.pack_into("<H6xQ", content, at + 16, index, size)
    path.write_bytes(content)
    said = rf"texts.hdf5: 'maker' cannot be read: .*text at byte {at:,} has no end"
    with open_hdf5(path) as file:
        with pytest.raises(DatasetError, match=said), reading(path, "maker"):
            attributes_of(file)
        with pytest.raises(DatasetError, match="'notes' cannot be read"), reading(path, "notes"):
            value_of(file["notes"])


def test_numbers_are_read_without_looking(path, monkeypatch):
    monkeypatch.setattr(heaps, "_first_damaged", lambda *_: 0)
    with open_hdf5(path) as file:
        assert value_of(file["numbers"])[:3] == [0, 1, 2]
