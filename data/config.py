"""Configurations: frozen, closed models with one canonical form, shared by study files, command line and Python."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every configuration. Unknown keys are refused; equal values compare and hash equal.

    A configuration that is one choice among several (a labeler, an algorithm, a reader) adds `kind`, a literal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
