"""Labelers: what a step is worth, and who says so. One file each; the registry is the union below."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from labelers.source import Source
from labelers.zero import Zero

AnyLabeler: TypeAlias = Annotated[Source | Zero, Field(discriminator="kind")]
