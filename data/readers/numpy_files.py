"""Arrays in `.npz` and `.npy` files, read in pieces and never unpickled, with errors that name file and array."""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.lib import format as npy

from data.errors import DatasetError
from data.readers.files import check_readable, closed_on_failure

NPY_SIGNATURE, ZIP_SIGNATURE = b"\x93NUMPY", b"PK\x03\x04"


@contextmanager
def reading_numpy(where: str) -> Iterator[None]:
    """Turn what zipfile and numpy raise into a DatasetError that says where it was."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        RuntimeError,
        MemoryError,
        tokenize.TokenError,
    ) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DatasetError(f"{where} cannot be read: the file is damaged or cut short ({reason}).") from error


class NumpyArray:
    """One array in a file, of which rows are read; fastest in order.

    where: file and name, for messages. shape, dtype: as in the file.
    """

    def __init__(self, where: str, stream: IO[bytes], n_bytes: int) -> None:
        """stream: at the beginning of what `numpy.save` wrote, n_bytes long. Raises DatasetError unless it is whole."""
        self.where, self._stream = where, stream
        with reading_numpy(where):
            version = npy.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            self.shape, self._fortran, self.dtype = read_header(stream)
            self._start = stream.tell()
        self._whole: np.ndarray | None = None
        expected = math.prod(self.shape) * self.dtype.itemsize
        if not self.dtype.hasobject and n_bytes - self._start != expected:
            raise DatasetError(
                f"{where} is cut short: it has {n_bytes - self._start:,} bytes, and {self.dtype} {self.shape} needs "
                f"{expected:,}. Download or make it again."
            )

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Rows start .. stop, in memory. Raises DatasetError for Python objects, and for a damaged file."""
        if self.dtype.hasobject:
            raise DatasetError(
                f"{self.where} holds Python objects, which only pickle can read, and pickle can run any code. Save it "
                "as numbers, with rows of one shape."
            )
        if self._fortran and len(self.shape) > 1:
            if self._whole is None:
                self._whole = self._read(0, math.prod(self.shape)).reshape(self.shape, order="F")
            return self._whole[rows]
        start, stop, _ = rows.indices(self.shape[0])
        n, row = max(stop - start, 0), math.prod(self.shape[1:])
        return self._read(start * row, n * row).reshape(n, *self.shape[1:])

    def scalar(self) -> np.generic:
        """The value of an array without dimensions."""
        value: np.generic = self._read(0, 1)[0]
        return value

    def _read(self, first: int, count: int) -> np.ndarray:
        with reading_numpy(self.where):
            self._stream.seek(self._start + first * self.dtype.itemsize)
            content = self._stream.read(count * self.dtype.itemsize)
            return np.frombuffer(content, self.dtype, count)


class NumpyFiles:
    """An opened `.npz` file, or a folder of `.npy` files; a context manager that closes it.

    arrays: by name, in the order of the file; in a folder by the names of its files, in alphabetic order.
    """

    def __init__(self, path: Path) -> None:
        """Raises DatasetError if the file is missing, neither of these, or damaged."""
        check_readable(path)
        self._streams: list[IO[bytes]] = []
        self.arrays: dict[str, NumpyArray] = {}
        with closed_on_failure(self):
            if path.is_dir():
                self._open_folder(path)
            else:
                self._open_archive(path)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_folder(self, path: Path) -> None:
        for file in sorted(path.glob("*.npy")):
            check_readable(file)
            stream = file.open("rb")
            self._streams.append(stream)
            self.arrays[file.stem] = NumpyArray(f"{file.name}: it", stream, file.stat().st_size)

    def _open_archive(self, path: Path) -> None:
        file = path.open("rb")
        self._streams.append(file)
        if file.read(len(ZIP_SIGNATURE)) != ZIP_SIGNATURE:
            raise DatasetError(f"{path.name}: not an .npz file. Save arrays with numpy.savez_compressed.")
        with reading_numpy(f"{path.name}: its contents"):
            archive = zipfile.ZipFile(file)
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with reading_numpy(f"{path.name}: '{name}'"):
                stream = archive.open(member)  # raises if its two names in the archive differ, whatever they end in
            self._streams.append(stream)
            if name != member.filename:
                self.arrays[name] = NumpyArray(f"{path.name}: '{name}'", stream, member.file_size)


def is_npz(path: Path) -> bool:
    """Whether a file begins as `.npz` files do."""
    with path.open("rb") as stream:
        return stream.read(len(ZIP_SIGNATURE)) == ZIP_SIGNATURE
