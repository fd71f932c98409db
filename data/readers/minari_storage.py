"""How Minari lays episodes on disk: one HDF5 file with a group an episode, or a folder of Arrow or Parquet an episode.

    main_data.hdf5   episode_0/observations, actions, rewards, terminations, truncations; attribute `total_steps`
                     dict observations are groups of arrays, tuples groups of `_index_0`, `_index_1`, ...
    0/part-0.arrow   the same names as columns, dicts and tuples as structs; one row more than steps, whose actions and
    0/metadata.json  flags are padding; `total_steps` says how many steps there are

Images of 32 x 32 and more are JPEG in both, unless the dataset says otherwise.
"""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import JsonValue

from data.errors import DatasetError
from data.readers.arrow import column_values, open_parquet, read_arrow, reading_arrow
from data.readers.files import read_json
from data.readers.hdf5 import arrays, attributes_of, check_array, names, open_hdf5, reading
from data.readers.observations import PLAIN
from data.readers.reader import Space

Declared = Mapping[str, Space]
"""Space of each array as the dataset's metadata declare it, by dotted name (`PLAIN` for a single array)."""

MAIN = "main_data.hdf5"


class MinariStorage(ABC):
    """The episodes of one data folder, or of one HDF5 file.

    episodes: their numbers, in order; at least one.
    """

    episodes: list[int]

    @abstractmethod
    def attributes(self) -> dict[str, JsonValue]:
        """What the storage says about itself beside `metadata.json`."""

    @abstractmethod
    def spaces(self, declared: Declared) -> dict[str, Space]:
        """Space of each observation array, by dotted name, as the first episode has it."""

    @abstractmethod
    def observations(self, episode: int, key: str, space: Space) -> np.ndarray:
        """[T + 1, ...] or [T, ...] one array of observations; images decoded."""

    @abstractmethod
    def column(self, episode: int, key: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
        """[T, ...] actions, rewards, terminations or truncations; None if they are not there.

        shape: of one row, if declared.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @staticmethod
    def name(episode: int) -> str:
        """What an episode is called in messages."""
        return f"episode_{episode}"


class HDF5Storage(MinariStorage):
    """All episodes in one HDF5 file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_hdf5(path)
        with reading(path, "/"):
            self.episodes = sorted(int(m[1]) for key in names(self._file) if (m := re.fullmatch(r"episode_(\d+)", key)))
        if not self.episodes:
            self._file.close()
            raise DatasetError(f"{path.name}: no groups 'episode_0', 'episode_1', ...: not a Minari file, or empty.")

    def close(self) -> None:
        self._file.close()

    def attributes(self) -> dict[str, JsonValue]:
        with reading(self._path, "attributes"):
            return attributes_of(self._file)

    def spaces(self, declared: Declared) -> dict[str, Space]:
        root = f"{self.name(self.episodes[0])}/observations"
        with reading(self._path, root):
            found = self._file.get(root)
        if isinstance(found, h5py.Dataset):
            self._paths = {PLAIN: "observations"}
        elif isinstance(found, h5py.Group):
            self._paths = {_dotted(key): f"observations/{key}" for key in arrays(found, self._path)}
        else:
            raise DatasetError(f"{self._path.name}: '{root}' is missing.")
        spaces = {}
        for key, path in self._paths.items():
            array = self._array(self.episodes[0], path)
            assert array is not None
            images = _is_image(declared.get(key)) and (array.ndim == 1 or array.shape[1:] != declared[key].shape)
            kind = "text" if array.dtype.kind in "OSU" else array.dtype.name
            spaces[key] = declared[key] if images else Space(shape=array.shape[1:], dtype=kind)
        return spaces

    def observations(self, episode: int, key: str, space: Space) -> np.ndarray:
        path = self._paths[key]
        array = self._array(episode, path)
        if array is None:
            raise DatasetError(f"{self._path.name}: '{self.name(episode)}/{path}' is missing.")
        values = self._values(episode, path, array)
        if _is_image(space) and (values.ndim == 1 or values.shape[1:] != space.shape):
            pictures = [np.asarray(picture, np.uint8).tobytes() for picture in values]
            return decoded(f"{self._path.name}: {self.name(episode)}: '{key}'", pictures, space)
        return values

    def column(self, episode: int, key: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
        array = self._array(episode, key)
        return None if array is None else self._values(episode, key, array)

    def _array(self, episode: int, key: str) -> h5py.Dataset | None:
        full = f"{self.name(episode)}/{key}"
        with reading(self._path, full):
            array = self._file.get(full)
        if array is None:
            return None
        if not isinstance(array, h5py.Dataset) or not array.shape:
            raise DatasetError(f"{self._path.name}: '{full}' is no array with one row a step.")
        check_array(self._path, full, array)
        return array

    def _values(self, episode: int, key: str, array: h5py.Dataset) -> np.ndarray:
        with reading(self._path, f"{self.name(episode)}/{key}"):
            values: np.ndarray = array[()]
        return values


class ArrowStorage(MinariStorage):
    """A folder of Arrow or Parquet files for each episode."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.episodes = sorted(int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdecimal())
        if not self.episodes:
            raise DatasetError(f"{folder.name}: no folders '0', '1', ... of episodes: empty, or not Minari.")
        self._read: tuple[int, pa.Table, int] | None = None  # the last episode read

    def close(self) -> None:
        self._read = None

    def attributes(self) -> dict[str, JsonValue]:
        return {}

    def spaces(self, declared: Declared) -> dict[str, Space]:
        table, _ = self._episode(self.episodes[0])
        if "observations" not in table.column_names:
            raise DatasetError(f"{self._folder.name}/{self.episodes[0]}: there is no column 'observations'.")
        self._fields: dict[str, tuple[str, ...]] = {}
        spaces = {}
        for fields, kind in _leaves(table.schema.field("observations").type):
            key = ".".join(fields) or PLAIN
            self._fields[key] = fields
            spaces[key] = _arrow_space(kind, declared.get(key))
        return spaces

    def observations(self, episode: int, key: str, space: Space) -> np.ndarray:
        table, _ = self._episode(episode)
        name = f"{self._folder.name}/{episode}"
        with reading_arrow(name, f"'{key}'"):
            column = table.column("observations").combine_chunks()
            for field in self._fields[key]:
                column = column.field(field)
        if pa.types.is_binary(column.type):
            return decoded(f"{name}: '{key}'", column.to_pylist(), space)
        return column_values(name, key, column, space.shape)

    def column(self, episode: int, key: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
        table, n_steps = self._episode(episode)
        if key not in table.column_names:
            return None
        column = table.column(key).slice(0, n_steps)
        if shape is None:
            shape = _arrow_space(column.type, None).shape
        return column_values(f"{self._folder.name}/{episode}", key, column, shape)

    def _episode(self, episode: int) -> tuple[pa.Table, int]:
        """The rows of an episode, and how many of them are steps."""
        if self._read is None or self._read[0] != episode:
            folder = self._folder / str(episode)
            name = f"{self._folder.name}/{episode}"
            files = sorted(folder.glob("*.arrow")) + sorted(folder.glob("*.parquet"))
            if not files:
                raise DatasetError(f"{name}: no Arrow or Parquet file: download or make it again.")
            parts = [_table(file, f"{name}/{file.name}") for file in files]
            with reading_arrow(name, "its files"):
                table = pa.concat_tables(parts)
            steps = read_json(folder / "metadata.json", f"{name}/metadata.json").get("total_steps")
            if not isinstance(steps, int) or steps not in (len(table), len(table) - 1):
                raise DatasetError(
                    f"{name}/metadata.json: total_steps is {steps} and the episode has {len(table):,} rows; expected "
                    "as many, or one fewer."
                )
            self._read = (episode, table, steps)
        return self._read[1:]


def decoded(where: str, pictures: Sequence[bytes | None], space: Space) -> np.ndarray:
    """[n, ...] uint8 of n compressed pictures.

    where: for messages. space: what they are declared to be. Raises DatasetError, naming the step, if one is not that.
    """
    rows = []
    for step, picture in enumerate(pictures):
        try:
            with Image.open(io.BytesIO(picture or b"")) as image:
                values = np.asarray(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DatasetError(f"{where}: the picture of step {step} cannot be decoded ({error}).") from error
        if values.shape != space.shape:
            found = f"has shape {values.shape}; declared {space.shape}"
            raise DatasetError(f"{where}: the picture of step {step} {found}.")
        rows.append(values)
    return np.array(rows, np.uint8).reshape(len(rows), *space.shape)


def _table(file: Path, name: str) -> pa.Table:
    if file.suffix == ".arrow":
        return read_arrow(file, name)
    parquet = open_parquet(file, name)
    with reading_arrow(name, "its content"):
        return parquet.read()


def _leaves(kind: pa.DataType, fields: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], pa.DataType]]:
    """The fields that lead to each type that is no struct."""
    if not pa.types.is_struct(kind):
        return [(fields, kind)]
    return [leaf for field in kind for leaf in _leaves(field.type, (*fields, field.name))]


def _arrow_space(kind: pa.DataType, declared: Space | None) -> Space:
    """Space of a column's rows. Lists are flat in Arrow: their shape is what is declared."""
    if pa.types.is_binary(kind):
        return declared if declared is not None and _is_image(declared) else Space(shape=(), dtype="bytes")
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    try:
        dtype = np.dtype(kind.to_pandas_dtype()).name
    except NotImplementedError:
        dtype = str(kind)
    return Space(shape=shape if declared is None else declared.shape, dtype="text" if dtype == "object" else dtype)


def _is_image(space: Space | None) -> bool:
    return space is not None and space.dtype == "uint8" and len(space.shape) in (2, 3)


def _dotted(key: str) -> str:
    """`a/_index_0` as `a.0`."""
    return ".".join(re.sub(r"^_index_(\d+)$", r"\1", part) for part in key.split("/"))
