"""Reads and writes of files that the system carries out in steps, as it may at a signal or beyond 2 GiB."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmkv_server.node.tiers.disk.folder import read_at, write_at

STEP = 1000
CONTENT = bytes(number % 251 for number in range(10 * STEP + 7))


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads and writes at most `STEP` bytes at a time."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:STEP]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:STEP], offset))


@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_what_takes_several_steps_is_whole_and_in_its_place(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * offset)
    with path.open("r+b", buffering=0) as file:
        write_at(file.fileno(), memoryview(CONTENT), offset)
        assert path.read_bytes() == b"x" * offset + CONTENT
        memory = bytearray(len(CONTENT) + STEP)
        assert read_at(file.fileno(), memoryview(memory), offset) == len(CONTENT), "up to the end of the file"
        assert memory == CONTENT + bytes(STEP)
