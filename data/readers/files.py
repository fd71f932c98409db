"""Files as people have them: missing, empty, or a web page that says why."""

from __future__ import annotations

from pathlib import Path

from data.errors import DatasetError


def check_readable(path: Path) -> None:
    """Raise DatasetError unless `path` is a folder, or a file that may hold data."""
    if not path.exists():
        raise DatasetError(f"{path}: there is no such file.")
    if path.is_dir():
        return
    if path.stat().st_size == 0:
        raise DatasetError(f"{path.name}: the file is empty (0 bytes). Download or make it again.")
    with path.open("rb") as stream:
        head = stream.read(512).lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise DatasetError(f"{path.name}: not a dataset; it looks like a web page. Download it again.")
