"""Progress of work over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of steps just done."""


def silent(done: int) -> None:
    """Progress nobody watches."""
