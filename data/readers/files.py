"""Files as people have them: missing, empty, a web page that says why, or JSON that is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from data.errors import DatasetError


def check_readable(path: Path, name: str | None = None) -> None:
    """Raise DatasetError unless `path` is a folder, or a file that may hold data. name: what to call it."""
    name = name or path.name
    if not path.exists():
        raise DatasetError(f"{path}: there is no such file.")
    if path.is_dir():
        return
    if path.stat().st_size == 0:
        raise DatasetError(f"{name}: the file is empty (0 bytes). Download or make it again.")
    with path.open("rb") as stream:
        head = stream.read(512).lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise DatasetError(f"{name}: not a dataset; it looks like a web page. Download it again.")


def read_json(path: Path, name: str | None = None) -> dict[str, JsonValue]:
    """The JSON object that a file holds, NaN and infinity as text. name: what to call the file.

    Raises DatasetError if the file is missing or holds no JSON object.
    """
    check_readable(path, name)
    return parse_json(path.read_bytes(), name or path.name)


def parse_json(text: str | bytes, name: str) -> dict[str, JsonValue]:
    """The JSON object in a text, NaN and infinity as text. Raises DatasetError, naming `name`, if it is none."""
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError as error:
        raise DatasetError(f"{name}: not JSON ({error}): it is damaged. Download or make it again.") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{name}: a JSON {type(value).__name__}; expected an object with names.")
    return value


def natural(name: object) -> list[str | int]:
    """Sorts names with numbers in them by those numbers: `run-2` before `run-10`."""
    parts = re.split(r"(\d+)", str(name))
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


class Closable(Protocol):
    """Anything that can be closed."""

    def close(self) -> None: ...


@contextmanager
def closed_on_failure(file: Closable) -> Iterator[None]:
    """Close `file` if what is done here, to understand it, fails."""
    try:
        yield
    except BaseException:
        file.close()
        raise
