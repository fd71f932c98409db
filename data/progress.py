"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], None]
"""Called with the number just done: steps read or trained, episodes labelled, passes made while fitting."""


def silent(done: int) -> None:
    """Progress nobody watches."""
