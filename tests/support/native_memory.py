"""Memory that native libraries have allocated in this process and not freed: Python counts none of it."""

from __future__ import annotations

import ctypes
import gc

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_LIBC = ctypes.CDLL(None)
IS_COUNTED = hasattr(_LIBC, "mallinfo2")
"""Whether the C library counts it: glibc from 2.33 on does."""


class _Mallinfo2(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)


def allocated_bytes() -> int:
    """Bytes that `malloc` has given out in this process, without large blocks, after a garbage collection."""
    gc.collect()
    _LIBC.mallinfo2.restype = _Mallinfo2
    return int(_LIBC.mallinfo2().uordblks)
