"""AES-256-GCM and HKDF-SHA256, by the package `cryptography`, which no other module imports."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def derive(secret: bytes, purpose: bytes, size_bytes: int) -> bytes:
    """Bytes that follow from a secret and a purpose, and do not reveal the secret."""
    return HKDF(algorithm=SHA256(), length=size_bytes, salt=None, info=purpose).derive(secret)


class Encryptor:
    """Encrypts one text in steps."""

    def __init__(self, key: bytes, nonce: bytes, associated: bytes) -> None:
        """`associated` is authenticated with the text, and is no part of it."""
        self._context = Cipher(algorithms.AES256(key), modes.GCM(nonce)).encryptor()
        self._context.authenticate_additional_data(associated)

    def update_into(self, source: bytes | memoryview, target: bytearray | memoryview) -> None:
        """Encrypts the next bytes; `target` has the length of `source` and does not overlap it."""
        self._context.update_into(source, target)

    def tag(self) -> bytes:
        """Ends the text; returns what authenticates it."""
        self._context.finalize()
        return self._context.tag


class Decryptor:
    """Decrypts one text in steps. What it returns is not to be trusted before `is_authentic`."""

    def __init__(self, key: bytes, nonce: bytes, associated: bytes) -> None:
        self._context = Cipher(algorithms.AES256(key), modes.GCM(nonce)).decryptor()
        self._context.authenticate_additional_data(associated)

    def update_into(self, source: bytes | memoryview, target: bytearray | memoryview) -> None:
        """Decrypts the next bytes; `target` has the length of `source` and does not overlap it."""
        self._context.update_into(source, target)

    def is_authentic(self, tag: bytes) -> bool:
        """Ends the text; whether it and its associated data are what was encrypted with this key."""
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True
