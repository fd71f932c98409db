"""Arrays in numpy's files are read in pieces as numpy reads them whole, or refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from data.errors import DatasetError
from data.readers.numpy_files import NumpyFiles

ARRAYS = {
    "vector": np.arange(7, dtype=np.int32),
    "rows": np.arange(42, dtype=">f8").reshape(7, 2, 3),
    "columns_first": np.asfortranarray(np.arange(14, dtype=np.float32).reshape(7, 2)),
    "flags": np.arange(7) % 2 == 0,
    "empty": np.zeros((0, 3)),
    "no_width": np.zeros((7, 0)),
}


@pytest.fixture(params=["npz", "compressed npz", "folder"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        for name, values in ARRAYS.items():
            np.save(tmp_path / f"{name}.npy", values)
        return tmp_path
    save = np.savez if request.param == "npz" else np.savez_compressed
    save(tmp_path / "arrays.npz", **ARRAYS)
    return tmp_path / "arrays.npz"


@pytest.mark.parametrize("rows", [slice(None), slice(0, 3), slice(3, 7), slice(5, 2), slice(6, 99)])
def test_rows_are_what_numpy_reads_in_any_order(path, rows):
    with NumpyFiles(path) as file:
        assert file.arrays.keys() == ARRAYS.keys()
        for name, values in ARRAYS.items():
            array = file.arrays[name]
            assert (array.shape, array.dtype) == (values.shape, values.dtype)
            for asked in (rows, slice(1, 2), rows):
                np.testing.assert_array_equal(array[asked], values[asked])


def test_a_single_value_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", name="hopper", count=3)
    with NumpyFiles(tmp_path / "a.npz") as file:
        assert (file.arrays["name"].scalar(), file.arrays["count"].scalar()) == ("hopper", 3)


def test_objects_are_listed_and_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", infos=np.array([{}, {}], dtype=object))
    with (
        NumpyFiles(tmp_path / "a.npz") as file,
        pytest.raises(DatasetError, match=r"^a\.npz: 'infos' holds Python objects"),
    ):
        file.arrays["infos"][:]


def test_an_array_that_is_not_whole_is_named(tmp_path):
    np.save(tmp_path / "actions.npy", np.zeros((5, 2)))
    whole = (tmp_path / "actions.npy").read_bytes()
    (tmp_path / "actions.npy").write_bytes(whole[:-8])
    with pytest.raises(
        DatasetError, match=r"^actions\.npy: it is cut short: it has 72 bytes, and float64 \(5, 2\) needs"
    ):
        NumpyFiles(tmp_path)


def test_a_flipped_bit_in_an_archive_is_seen_by_its_checksum(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, values=np.zeros(1000))
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    with NumpyFiles(path) as file, pytest.raises(DatasetError, match=r"^a\.npz: 'values' cannot be read.*CRC"):
        file.arrays["values"][:]


def test_other_members_of_an_archive_are_left_alone(tmp_path):
    np.savez(tmp_path / "a.npz", values=np.arange(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("README.txt", "three values")
    with NumpyFiles(tmp_path / "a.npz") as file:
        assert list(file.arrays) == ["values"]


def test_an_array_renamed_by_damage_is_not_taken_for_another_member(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, values=np.arange(3))
    before, _, after = path.read_bytes().rpartition(b"values.npy")  # in the directory at the end
    path.write_bytes(before + b"values.npx" + after)
    with pytest.raises(DatasetError, match=r"^a\.npz: 'values\.npx' cannot be read"):
        NumpyFiles(path)


def test_a_damaged_header_is_named(tmp_path):
    np.save(tmp_path / "actions.npy", np.zeros((5, 2)))
    content = (tmp_path / "actions.npy").read_bytes()
    (tmp_path / "actions.npy").write_bytes(content.replace(b"}    ", b"}  ( ", 1))
    with pytest.raises(DatasetError, match=r"^actions\.npy: it cannot be read"):
        NumpyFiles(tmp_path)
