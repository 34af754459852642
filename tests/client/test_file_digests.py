"""Digests of whole files: all bytes count, nothing is read twice, and no file that has changed has one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv_client.file_digests import (
    MAX_ENTRIES,
    READ_BYTES,
    REMEMBERED_BYTES,
    UNCERTAIN_NS,
    RememberedDigests,
    digests,
    process_start,
    stamps,
)
from tests.waiting import wait_until

OTHER = "0" * 64


@pytest.fixture
def remembered(tmp_path: Path) -> RememberedDigests:
    """A file of digests of its own."""
    return RememberedDigests(tmp_path / "cache" / "lmkv")


def old_file(path: Path, content: bytes = b"weights", size: int = REMEMBERED_BYTES) -> Path:
    """A large file that was last changed some time ago."""
    path.write_bytes(content)
    os.truncate(path, size)
    changed = path.stat().st_ctime_ns
    wait_until(lambda: time.time_ns() > changed + UNCERTAIN_NS, "the file is old")
    return path


@pytest.mark.parametrize("size", [0, 1, READ_BYTES, READ_BYTES + 1])
def test_the_digest_is_the_sha256_of_all_bytes(tmp_path: Path, size: int) -> None:
    paths = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * size)
    assert digests(stamps(paths)) == {path: sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_large_file_is_read_once(tmp_path: Path, remembered: RememberedDigests) -> None:
    path = old_file(tmp_path / "model.safetensors")
    first = digests(stamps([path]), remembered)
    assert first[path] == sha256(path.read_bytes()).hexdigest()
    ((name, (stamp, digest)),) = remembered.load().items()
    assert (name, digest) == (str(path), first[path])
    remembered.add({name: (stamp, OTHER)})
    assert digests(stamps([path]), remembered)[path] == OTHER, "it was read again"


@pytest.mark.parametrize("size", [REMEMBERED_BYTES, REMEMBERED_BYTES + 1])
def test_a_file_that_was_replaced_is_read_again(tmp_path: Path, remembered: RememberedDigests, size: int) -> None:
    path = old_file(tmp_path / "model.safetensors")
    first = digests(stamps([path]), remembered)
    before = path.stat()
    path.write_bytes(b"other")
    os.truncate(path, size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp --preserve` does
    assert digests(stamps([path]), remembered) != first


def test_a_file_that_was_changed_a_moment_ago_is_not_remembered(tmp_path: Path, remembered: RememberedDigests) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    os.truncate(path, REMEMBERED_BYTES)
    ahead = time.time() + 3600
    assert path.stat().st_ctime < ahead
    digests(stamps([path]), remembered)
    if time.time_ns() < path.stat().st_ctime_ns + UNCERTAIN_NS:  # else the host was too busy
        assert remembered.load() == {}


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"other"), Path.unlink, lambda path: os.utime(path)])
def test_a_file_that_has_changed_has_no_digest(tmp_path: Path, change: object) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    stamped = stamps([path])
    wait_until(lambda: time.time_ns() > stamped[path].ctime_ns + 20_000_000, "the clock of the file system has ticked")
    assert callable(change)
    change(path)
    with pytest.raises((ConfigError, FileNotFoundError), match=r"model\.safetensors"):
        digests(stamped)


def test_a_hubs_cache_names_large_files_by_their_digest(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / OTHER, tmp_path / "snapshots" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir()
    blob.write_bytes(b"weights")
    link.symlink_to(blob)
    assert digests(stamps([link])) == {link: OTHER}
    small = blob.rename(blob.with_name("0" * 40))  # named by git
    link.unlink()
    link.symlink_to(small)
    assert digests(stamps([link])) == {link: sha256(b"weights").hexdigest()}


def test_what_is_remembered_is_bounded(remembered: RememberedDigests) -> None:
    entry = ((1, 2, 3, 4), OTHER)
    remembered.add({f"/{number}": entry for number in range(MAX_ENTRIES)})
    remembered.add({"/last": entry, "/5": entry})
    names = list(remembered.load())
    assert len(names) == MAX_ENTRIES
    assert names[-2:] == ["/last", "/5"]
    assert names[0] == "/1"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"/a": 1}', '{"/a": [[1, 2, 3], "b"]}', '{"/a": [null, 3]}'])
def test_a_damaged_file_of_digests_is_replaced(tmp_path: Path, remembered: RememberedDigests, content: str) -> None:
    remembered.add({"/a": ((1, 2, 3, 4), OTHER)})
    (tmp_path / "cache" / "lmkv" / "digests.json").write_text(content)
    assert remembered.load() == {}
    remembered.add({"/b": ((1, 2, 3, 4), OTHER)})
    assert list(remembered.load()) == ["/b"]


@pytest.mark.parametrize("name", [".", "digests.json"])
def test_digests_that_others_may_have_written_are_ignored(
    tmp_path: Path, remembered: RememberedDigests, name: str
) -> None:
    remembered.add({"/a": ((1, 2, 3, 4), OTHER)})
    assert remembered.load()
    (tmp_path / "cache" / "lmkv" / name).chmod(0o777)
    assert remembered.load() == {}


def test_a_folder_that_cannot_be_written_is_of_no_concern(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remembered = RememberedDigests(tmp_path / "file" / "lmkv")
    remembered.add({"/a": ((1, 2, 3, 4), OTHER)})
    assert remembered.load() == {}


def test_a_process_knows_when_it_was_started() -> None:
    began = time.time()
    child = subprocess.run(
        [sys.executable, "-c", "from lmkv_client.file_digests import process_start as p; print(p())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert process_start() < began
    assert began - 1 < float(child.stdout) < time.time()
