"""What goes wrong, said to the person who meets it.

Every message names what was found, what was expected, where (file, key, episode, step) and what to do.
"""

from __future__ import annotations


class AssayError(Exception):
    """Base of all errors meant for the person at the keyboard; `exit_code` is what the command line returns."""

    exit_code = 2


class DatasetError(AssayError):
    """A source file, or a dataset made from one, cannot be understood or is not sound."""


class StoreError(AssayError):
    """The store lacks something, or what lies there is not what its manifest says."""


class ConfigurationError(AssayError):
    """A setting is unknown, contradictory, or names something that does not exist."""


class WorkError(AssayError):
    """Work failed part-way; the message says what is kept and how to go on."""

    exit_code = 1
