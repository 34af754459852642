"""Memory of its own for each thread that encodes or encrypts chunks."""

from __future__ import annotations

import mmap
import threading


class ThreadBuffer:
    """A buffer for each thread, aligned to pages as direct I/O requires, that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def get(self, size_bytes: int) -> memoryview:
        """The buffer of this thread, of this size or longer, with any content. The thread's next call reuses it."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.memory = memoryview(mmap.mmap(-1, max(1, size_bytes)))
        return buffer
