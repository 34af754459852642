"""Names of files describe a chunk completely, and names that lmkv has not written are ignored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.tiers.disk.folder import DiskChunk, parse_file_name, read_at, write_at

keys = st.binary(min_size=16, max_size=16).map(ChunkKey)
plain_or_encrypted: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"checksum": st.integers(0, 2**64 - 1)}),
    st.fixed_dictionaries({"key_id": st.binary(min_size=8, max_size=8)}),
)
chunks = st.builds(
    lambda content, **fields: DiskChunk(**fields, **content),
    content=plain_or_encrypted,
    key=keys,
    parent=st.none() | keys,
    fingerprint=st.binary(min_size=16, max_size=16),
    token_count=st.integers(1, 1 << 20),
    size_bytes=st.integers(1, 1 << 40),
    serial=st.integers(0, 2**64 - 1),
)


@given(chunks)
def test_a_name_gives_back_the_chunk_that_it_was_made_of(chunk: DiskChunk) -> None:
    assert parse_file_name(chunk.file_name) == chunk
    assert len(chunk.file_name) <= 255
    assert chunk.memory_bytes % ALIGNMENT == 0
    assert 0 <= chunk.memory_bytes - chunk.size_bytes < ALIGNMENT
    assert chunk.file_bytes - chunk.memory_bytes == (ALIGNMENT if chunk.key_id else 0)


@given(chunks, st.data())
def test_a_name_with_another_character_anywhere_is_none(chunk: DiskChunk, data: st.DataObject) -> None:
    name = chunk.file_name
    at = data.draw(st.integers(0, len(name) - 1))
    character = data.draw(st.sampled_from("0123456789abcdefk-.xA").filter(lambda other: other != name[at]))
    assert parse_file_name(name[:at] + character + name[at + 1 :]) is None


@given(st.text() | chunks.map(lambda chunk: chunk.file_name[1:]) | chunks.map(lambda chunk: chunk.file_name + "~"))
def test_other_names_are_none(name: str) -> None:
    assert parse_file_name(name) is None


@pytest.mark.parametrize(("token_count", "size_bytes"), [(0, 1), (1, 0)])
def test_a_name_of_no_tokens_or_no_bytes_is_none(token_count: int, size_bytes: int) -> None:
    key = ChunkKey(bytes(16))
    chunk = DiskChunk(key=key, fingerprint=key, token_count=token_count, size_bytes=size_bytes, serial=1)
    assert parse_file_name(chunk.file_name) is None


STEP = 1000
CONTENT = bytes(number % 251 for number in range(10 * STEP + 7))


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads and writes at most `STEP` bytes at a time."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:STEP]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:STEP], offset))


@pytest.mark.usefixtures("short_steps")
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
