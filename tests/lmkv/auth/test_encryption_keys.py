"""The file of encryption keys: what it may contain, who may access it, and that no message contains a key."""

from __future__ import annotations

import base64
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.auth.encryption_keys import MAX_FILE_BYTES, MAX_KEYS, EncryptionKey, read_encryption_keys
from lmkv.errors import ConfigError
from tests.support.encryption_keys import key_line, secret_of, write_keys

SECRET = base64.b64encode(bytes(range(32))).decode()


def refusal(path: Path, text: str | bytes) -> str:
    """The one line by which a file with this content is refused."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_encryption_keys(str(path))
    message = str(caught.value)
    assert message.startswith("encryption_key_file: ")
    assert str(path) in message
    assert "\n" not in message
    assert caught.value.metadata["key"] == "encryption_key_file"
    return message


def test_the_keys_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    keys = read_encryption_keys(write_keys(tmp_path / "keys", "new", "old", "older"))
    assert [key.name for key in keys] == ["new", "old", "older"]
    assert [key.secret for key in keys] == [secret_of("new"), secret_of("old"), secret_of("older")]


def test_comments_spaces_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\n  2026-11\t {SECRET}   # since November\n#{key_line('removed')}\n")
    path.chmod(0o440)
    assert read_encryption_keys(str(path)) == (EncryptionKey(name="2026-11", secret=bytes(range(32))),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 keys"),
        ("# nothing\n", "has 0 keys"),
        (f"{SECRET}\n", "line 1: expected a name and a key"),
        (f"a {SECRET} x\n", "line 1: expected a name and a key"),
        (f"ok {SECRET}\n{SECRET} ok\n", "line 2: expected a name and a key"),
        (f"a/b {SECRET}\n", "line 1: expected a name and a key"),
        (f"a {SECRET[:-1]}\n", "line 1: the key is not 32 bytes"),
        (f"a {SECRET[4:]}\n", "line 1: the key is not 32 bytes"),
        (f"a {SECRET[:-2]}!=\n", "line 1: the key is not 32 bytes"),
        (f"a {SECRET}\na {base64.b64encode(bytes(32)).decode()}\n", "has a name or a key twice"),
        (f"a {SECRET}\nb {SECRET}\n", "has a name or a key twice"),
        ("".join(key_line(f"k{number}") for number in range(MAX_KEYS + 1)), f"has {MAX_KEYS + 1} keys"),
        ("#" * MAX_FILE_BYTES + "\n", "is larger than"),
        (b"\xff\xfe", "is not ASCII text"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_without_showing_a_key(tmp_path: Path, text: str | bytes, why: str) -> None:
    message = refusal(tmp_path / "keys", text)
    assert why in message
    assert SECRET[:8] not in message


@given(st.text(max_size=200))
def test_any_text_gives_keys_of_full_length_or_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    keys: tuple[EncryptionKey, ...] = ()
    with suppress(ConfigError):
        keys = read_encryption_keys(str(path))
    assert all(len(key.secret) == 32 for key in keys)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_that_others_cannot_access_is_accepted(tmp_path: Path, mode: int) -> None:
    assert read_encryption_keys(write_keys(tmp_path / "keys", "a", mode=mode))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o777])
def test_a_file_that_others_may_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod it to 600") as caught:
        read_encryption_keys(write_keys(tmp_path / "keys", "a", mode=mode))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "a")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_encryption_keys(path)


def test_what_is_no_regular_file_or_missing_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, why in ((tmp_path / "pipe", "is not a file"), (tmp_path, "is not a file"), (tmp_path / "x", "No such")):
        with pytest.raises(ConfigError, match=why):
            read_encryption_keys(str(path))


def test_a_link_to_a_file_is_followed_as_kubernetes_makes_them(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write_keys(tmp_path / "keys", "a"))
    assert read_encryption_keys(str(tmp_path / "link"))


def test_no_text_of_a_key_shows_its_secret() -> None:
    key = EncryptionKey(name="a", secret=b"hush" * 8)
    assert "hush" not in f"{key} {key!r}"
