"""How memory is used by loops that make the same large tensors again and again."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 256 MiB of freed memory and to use it again.

    It would hand a step's tensors back to the system and fetch fresh pages for the next. Stays so, for the main thread:
    memory of others is kept per thread, so compute there. Does nothing where the C library is another one.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 28)
