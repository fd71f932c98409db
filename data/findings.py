"""Findings: what a reader noticed or decided about a source, kept in the manifest and printed by checks."""

from __future__ import annotations

from enum import StrEnum

from data.config import Config


class Severity(StrEnum):
    """How much a finding matters."""

    NOTE = "note"  # a decision on record; nothing is lost
    WARNING = "warning"  # something was left out, or may not be what the person meant
    ERROR = "error"  # the source is refused


class Finding(Config):
    """One thing noticed in a source, or one decision taken while reading it.

    code: short and stable, for scripts (`unfinished-last-episode`). message: found, consequence, and what to do if
    it is not wanted. episode, step: where, counted from 0, if in one place. count: of how many places it
        speaks.
    """

    code: str
    severity: Severity
    message: str
    episode: int | None = None
    step: int | None = None
    count: int = 1
