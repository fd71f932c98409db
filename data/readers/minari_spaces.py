"""Spaces as Minari writes them into `metadata.json`: JSON inside a text (`minari/serialization.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic
from pydantic import Field

from data.errors import DatasetError
from data.readers.observations import PLAIN
from data.readers.reader import Space


class Box(pydantic.BaseModel):
    """Numbers between bounds. low, high: nested lists of `shape`."""

    type: Literal["Box"]
    dtype: str
    shape: tuple[int, ...]
    low: Any
    high: Any

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest value of each dimension, [d] float64."""
        return np.array(self.low, np.float64).reshape(-1), np.array(self.high, np.float64).reshape(-1)


class Discrete(pydantic.BaseModel):
    """One choice among `n`, counted from `start`."""

    type: Literal["Discrete"]
    n: int
    start: int = 0


class MultiDiscrete(pydantic.BaseModel):
    """Several choices, each among `nvec` counted from `start`."""

    type: Literal["MultiDiscrete"]
    nvec: list[int]
    start: list[int] = Field(default_factory=list)


class MultiBinary(pydantic.BaseModel):
    """Several choices between 0 and 1."""

    type: Literal["MultiBinary"]
    n: int | list[int]


class Dict(pydantic.BaseModel):
    """Spaces by name."""

    type: Literal["Dict"]
    subspaces: dict[str, MinariSpace]


class Tuple(pydantic.BaseModel):
    """Spaces in order."""

    type: Literal["Tuple"]
    subspaces: list[MinariSpace]


class Text(pydantic.BaseModel):
    """A text."""

    type: Literal["Text"]


MinariSpace: TypeAlias = Annotated[
    Box | Discrete | MultiDiscrete | MultiBinary | Dict | Tuple | Text, Field(discriminator="type")
]
_PARSER: pydantic.TypeAdapter[MinariSpace] = pydantic.TypeAdapter(MinariSpace)


def parse_space(text: str, name: str) -> MinariSpace:
    """A space from its text. name: of the file and key, for messages. Raises DatasetError if it is none of these."""
    try:
        return _PARSER.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise DatasetError(f"{name} is no space that can be read ({where}: {first['msg']}).") from error


def leaves(space: MinariSpace, prefix: str = "") -> dict[str, Space]:
    """Shape and dtype of every array in a space, by dotted name; that of a space that is one array is `PLAIN`."""
    match space:
        case Dict():
            parts = list(space.subspaces.items())
        case Tuple():
            parts = [(str(place), part) for place, part in enumerate(space.subspaces)]
        case Box():
            return {prefix or PLAIN: Space(shape=space.shape, dtype=space.dtype)}
        case Text():
            return {prefix or PLAIN: Space(shape=(), dtype="text")}
        case _:
            counts, _ = choices(space)
            return {prefix or PLAIN: Space(shape=counts.shape, dtype="int64")}
    return {
        key: leaf for name, part in parts for key, leaf in leaves(part, f"{prefix}.{name}" if prefix else name).items()
    }


def choices(space: Discrete | MultiDiscrete | MultiBinary) -> tuple[np.ndarray, np.ndarray]:
    """How many choices there are and where they start, int64, of the shape of one value."""
    match space:
        case Discrete():
            return np.array(space.n), np.array(space.start)
        case MultiDiscrete():
            return np.array(space.nvec), np.array(space.start or np.zeros(len(space.nvec), np.int64))
        case MultiBinary():
            counts = np.full(space.n, 2)
            return counts, np.zeros_like(counts)
