"""The file of keys that encrypt chunks at rest, one key a line, the first one for writing:

    2026-11  q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k=     # a name, and 32 bytes in base64
    2026-05  AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=     # older keys, for reading only

No message contains a key.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from dataclasses import dataclass, field

from lmkv.errors import ConfigError

KEY = "encryption_key_file"
"""The configuration key that names the file."""
SECRET_BYTES = 32
MAX_KEYS = 16
MAX_FILE_BYTES = 16_384
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncryptionKey:
    """A key of the file. `repr` does not show its secret."""

    name: str
    secret: bytes = field(repr=False)
    """`SECRET_BYTES` bytes, from which the keys of tenants are derived."""


def read_encryption_keys(path: str) -> tuple[EncryptionKey, ...]:
    """The keys of a file, at least one, the one for writing first.

    Raises `ConfigError` if the file cannot be read, is not valid, belongs to a user other than this one or root, or if
    its group may write it or others may access it.
    """
    text = _read(path)
    keys = [
        _parse(path, number, words)
        for number, line in enumerate(text.splitlines(), start=1)
        if (words := line.partition("#")[0].split())
    ]
    if not 0 < len(keys) <= MAX_KEYS:
        raise _refused(f"{path} has {len(keys)} keys, not 1 to {MAX_KEYS}; make one by `openssl rand -base64 32`")
    if len({key.name for key in keys}) < len(keys) or len({key.secret for key in keys}) < len(keys):
        raise _refused(f"{path} has a name or a key twice; give each key its own name")
    return tuple(keys)


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_access(path, os.fstat(fd))
            content = os.read(fd, MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
        if len(content) > MAX_FILE_BYTES:
            raise _refused(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return content.decode("ascii")
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refused(f"{path} is not ASCII text") from None


def _check_access(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused(f"{path} is not a file")
    if status.st_uid not in (0, os.getuid()):
        raise _refused(f"{path} belongs to user {status.st_uid}; only this user ({os.getuid()}) or root may own it")
    if status.st_mode & 0o027:
        raise _refused(f"other users may access {path} (mode {stat.S_IMODE(status.st_mode):o}); chmod it to 600 or 440")


def _parse(path: str, number: int, words: list[str]) -> EncryptionKey:
    """The key of a line. Messages name the line only: a word of it may be a key."""
    if len(words) != 2 or not _NAME.fullmatch(words[0]):
        raise _refused(f"{path}, line {number}: expected a name and a key in base64")
    try:
        secret = base64.b64decode(words[1], validate=True)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise _refused(f"{path}, line {number}: the key is not {SECRET_BYTES} bytes in base64")
    return EncryptionKey(name=words[0], secret=secret)


def _refused(why: str) -> ConfigError:
    return ConfigError(f"{KEY}: {why}", key=KEY)
