"""Writers: one file a format. The registry is `AnyWriter`."""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

from pydantic import Field

from data.writers.d4rl import D4RLWriter
from data.writers.lerobot import LeRobotWriter
from data.writers.minari import MinariWriter
from data.writers.writer import Writer

AnyWriter: TypeAlias = Annotated[D4RLWriter | MinariWriter | LeRobotWriter, Field(discriminator="kind")]
WRITERS: tuple[type[Writer], ...] = get_args(get_args(AnyWriter)[0])
"""All of them."""
