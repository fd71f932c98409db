"""What observations are: one array, or several by name, joined to one vector as asked and on record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from data.errors import DatasetError
from data.findings import Finding, Severity
from data.readers.reader import Reader, RefusedError, Space

PLAIN = "observations"
"""The name of observations that are a single array."""


class KeyedReader(Reader):
    """Settings of formats whose observations may be several arrays by name.

    observation_keys: those to read, joined to one vector in this order; all by default, in alphabetic order.
    """

    observation_keys: tuple[str, ...] | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class Observations:
    """How observations are delivered: as one array if there is one key, else joined to a vector.

    keys: names in the source. spaces: one for each. shape, dtype: of one delivered observation.
    """

    path: Path
    keys: tuple[str, ...]
    spaces: tuple[Space, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def deliver(self, columns: Mapping[str, np.ndarray], episode: str) -> np.ndarray:
        """[n, ...] from one array [n, ...] a key.

        Raises DatasetError, naming episode and key, where an array is not what its space says, or longer than others.
        """
        rows = [
            self._rows(columns[key], key, space, episode) for key, space in zip(self.keys, self.spaces, strict=True)
        ]
        if len({len(r) for r in rows}) > 1:
            lengths = ", ".join(f"'{key}' {len(r):,}" for key, r in zip(self.keys, rows, strict=True))
            raise DatasetError(f"{self.path.name}: {episode}: observations differ in number: {lengths}.")
        if len(rows) == 1:
            return np.ascontiguousarray(rows[0].reshape(len(rows[0]), *self.shape))
        return np.concatenate([r.reshape(len(r), -1) for r in rows], axis=1)

    def _rows(self, values: np.ndarray, key: str, space: Space, episode: str) -> np.ndarray:
        if values.shape[1:] != space.shape or not np.can_cast(values.dtype, space.dtype, "same_kind"):
            raise DatasetError(
                f"{self.path.name}: {episode}: '{key}' has rows of {values.dtype} {values.shape[1:]}; expected "
                f"{space.dtype} {space.shape}, as declared or as in the first episode."
            )
        with np.errstate(over="ignore"):
            return values.astype(self.dtype, copy=False)


def delivered_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Floats become float32, booleans uint8; integers (images) stay, in this machine's byte order."""
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("=")


def choose_observations(
    path: Path, spaces: Space | Mapping[str, Space], chosen: tuple[str, ...] | None, findings: list[Finding]
) -> Observations:
    """The observations to read, of the spaces that the source has; the choice is a finding.

    Several keys are joined in their delivered dtype if they share it, else as float32.
    Raises RefusedError for keys that are not there or cannot be joined.
    """
    if isinstance(spaces, Space):
        if chosen is not None:
            message = "observation_keys is given, but observations are a single array without keys: leave it out."
            raise _refused(path, findings, message)
        spaces = {PLAIN: spaces}
    present = sorted(spaces, key=_alphabetic)
    keys = tuple(present) if chosen is None else chosen
    unknown = [key for key in keys if key not in spaces]
    if unknown or len(set(keys)) < len(keys):
        what = f"'{unknown[0]}' is not among the observations" if unknown else "a key is given twice"
        raise _refused(path, findings, f"observation_keys: {what}; keys present: {', '.join(present) or 'none'}.")
    for key in keys:
        _check(path, key, spaces[key], len(keys), findings)
    dtypes = {delivered_dtype(np.dtype(spaces[key].dtype)) for key in keys}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    for key in keys:
        if np.dtype(spaces[key].dtype) != dtype:
            message = f"'{key}': {spaces[key].dtype} converted to {dtype.name}."
            findings.append(Finding(code="converted", severity=Severity.NOTE, message=message))
    if len(keys) == 1:
        shape = spaces[keys[0]].shape or (1,)
    else:
        shape = (sum(spaces[key].shape[0] if spaces[key].shape else 1 for key in keys),)
    if keys != (PLAIN,):
        findings.append(_choice(keys, present, spaces, shape, chosen is None))
    return Observations(path, keys, tuple(spaces[key] for key in keys), shape, dtype)


def _check(path: Path, key: str, space: Space, n_keys: int, findings: list[Finding]) -> None:
    choose = "Choose others with observation_keys."
    try:
        numeric = np.dtype(space.dtype).kind in "fiub"
    except TypeError:
        numeric = False
    if not numeric:
        raise _refused(path, findings, f"'{key}' is {space.dtype}: expected numbers. {choose}")
    if 0 in space.shape:
        raise _refused(path, findings, f"'{key}' has rows of shape {space.shape}: no numbers. {choose}")
    if n_keys > 1 and len(space.shape) > 1:
        message = f"'{key}' of shape {space.shape} cannot be joined with other keys to one vector. Choose it alone, or "
        raise _refused(path, findings, message + "only vectors, with observation_keys.")


def _choice(
    keys: tuple[str, ...], present: list[str], spaces: Mapping[str, Space], shape: tuple[int, ...], default: bool
) -> Finding:
    parts = ", ".join(f"{key} {spaces[key].shape}" for key in keys)
    joined = f"joined to one vector of {shape[0]}: {parts}, in this order" if len(keys) > 1 else parts
    others = [key for key in present if key not in keys]
    left = f" Not read: {', '.join(others)}." if others else ""
    advice = " All keys in alphabetic order; choose others with observation_keys." if default and len(keys) > 1 else ""
    message = f"observations are {joined}.{left}{advice}"
    return Finding(code="observation-keys", severity=Severity.NOTE, message=message, count=len(keys))


def _alphabetic(key: str) -> list[str]:
    """Parts of dotted keys, numbers (places in a tuple) by value."""
    return [part.zfill(9) if part.isdigit() else part for part in key.split(".")]


def _refused(path: Path, findings: list[Finding], message: str) -> RefusedError:
    findings.append(Finding(code="observations", severity=Severity.ERROR, message=message))
    return RefusedError(path, findings)
