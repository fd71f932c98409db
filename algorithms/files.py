"""Files of named tensors: safetensors with a format and JSON in the metadata, put in place at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.errors import StoreError


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, JsonValue]) -> None:
    """Write `tensors` and what is to be said about them; a reader sees the file before or after, never a part."""
    # One entry: safetensors writes several in an order of its own, and equal content would not be equal bytes.
    metadata = {"about": json.dumps({"format": kind, **about})}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.rename(path)


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """What was said about the tensors in `path`. Raises StoreError if that is no file of this kind."""
    return _read(path, kind, tensors=False)[0]


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What was said, and the tensors, on the CPU. Raises StoreError if that is no file of this kind."""
    return _read(path, kind, tensors=True)


def _read(path: Path, kind: str, tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("about", "{}"))
            read = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as {kind}: {error}. If it is damaged, delete it.") from error
    if about.get("format") != kind:
        raise StoreError(f"{path} is no {kind}: its format is {about.get('format')!r}.")
    return about, read
