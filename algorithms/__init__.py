"""Algorithms: how a policy is learned from labelled steps, and what it is worth."""

from typing import Annotated, TypeAlias

from pydantic import Field

from algorithms.bc import BC
from algorithms.iql import IQL

__all__ = ["BC", "IQL", "AnyAlgorithm"]

AnyAlgorithm: TypeAlias = Annotated[BC | IQL, Field(discriminator="kind")]
"""Every algorithm; a study picks one by `kind`."""
