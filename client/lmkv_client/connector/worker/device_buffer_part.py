"""One rank's part of the engine's device buffer: memory on the pages' device that handoffs are read into.

The node addresses whole chunks in one buffer. Each rank has that buffer shrunk to its own heads:

    whole chunk   [layer 0: head 0 │ head 1 │ head 2 │ head 3][layer 1: head 0 │ ...
    rank 1 of 2              [layer 0: head 2 │ head 3][layer 1: head 2 │ head 3]...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmkv.transfer.channel import Copy, Region
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.worker.word_sums import word_sums
from lmkv_kernels import ChunkCopy, Pages

STEP_BYTES = 4096
"""Offsets in the whole buffer are multiples of this."""
PIECE_BYTES = 16
"""Offsets in a part must be multiples of this, which kernels move at once."""
WORD_BYTES = 8


class DeviceBufferPart:
    """The part: memory of the device that the pages are on, or of the host where they are there.

    Raises `ValueError` if the buffer cannot be shrunk so, and `RuntimeError` if there is no memory for it.
    """

    def __init__(self, pages: Pages, buffer_size_bytes: int) -> None:
        """`buffer_size_bytes` is the size of the whole buffer."""
        self.pages = replace(pages, first_head=0, kv_head_count=pages.head_count)
        """The rank's pages, as if the model had no other heads."""
        self._heads, self._all_heads, self._first_head = pages.head_count, pages.kv_head_count, pages.first_head
        self._layer_count = len(pages.layer_addresses)
        if STEP_BYTES * self._heads % (self._all_heads * PIECE_BYTES):
            raise ValueError(f"a buffer cannot be shrunk evenly to {self._heads} of {self._all_heads} heads")
        self.buffer_size_bytes = buffer_size_bytes // STEP_BYTES * STEP_BYTES
        self.size_bytes = self._shrunk(self.buffer_size_bytes)
        self.tensor = torch.empty(self.size_bytes, dtype=torch.uint8, device=pages.device)
        make_stream: Any = torch.cuda.Stream  # has no types
        self._stream = make_stream(self.tensor.device) if self.tensor.is_cuda else None

    @property
    def device_address(self) -> int:
        """Where it begins, by the device's address."""
        return self.tensor.data_ptr()

    @property
    def host_address(self) -> int:
        """As `device_address`: the buffer is not copied to the host."""
        return self.device_address

    @property
    def region(self) -> Region:
        """Its memory, as channels see it."""
        device = self.tensor.device.index if self.tensor.is_cuda else None
        return Region(address=self.device_address, size_bytes=self.size_bytes, device=device)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """Its memory, where that is host memory."""
        return self.tensor.numpy()

    def prepare_thread(self) -> None:
        """Makes its device the calling thread's."""
        if self.tensor.is_cuda:
            torch.cuda.set_device(self.tensor.device)

    def shrunk(self, copies: Sequence[ChunkCopy]) -> list[ChunkCopy]:
        """Copies out of the whole buffer, as copies out of this part."""
        return [replace(copy, offset=self._shrunk(copy.offset)) for copy in copies]

    def reads(self, chunks: Sequence[pb.BufferCopy]) -> list[Copy]:
        """What is to be read of whole chunks: the rank's heads of each layer."""
        copies = []
        for chunk in chunks:
            layer_bytes = chunk.size_bytes // self._layer_count
            skipped, run = layer_bytes * self._first_head // self._all_heads, self._shrunk(layer_bytes)
            target = self.device_address + self._shrunk(chunk.offset)
            copies += [
                Copy(
                    remote_address=chunk.remote_address + layer * layer_bytes + skipped,
                    local_address=target + layer * run,
                    size_bytes=run,
                )
                for layer in range(self._layer_count)
            ]
        return copies

    def checksums(self, chunks: Sequence[pb.BufferCopy]) -> list[int]:
        """What the rank's words, as they are here now, add to the checksum of each chunk. Waits for the device."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return [self._checksum(chunk) for chunk in chunks]

    def _checksum(self, chunk: pb.BufferCopy) -> int:
        start, size_bytes = self._shrunk(chunk.offset), self._shrunk(chunk.size_bytes)
        words = self.tensor[start : start + size_bytes].view(torch.int64).view(self._layer_count, -1)
        layer_words = chunk.size_bytes // self._layer_count // WORD_BYTES
        first_words = torch.arange(self._layer_count, device=words.device) * layer_words
        return word_sums(words, first_words + layer_words * self._first_head // self._all_heads)

    def _shrunk(self, size_bytes: int) -> int:
        return size_bytes * self._heads // self._all_heads
