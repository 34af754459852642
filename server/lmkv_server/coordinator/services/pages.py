"""Page tokens of the List calls: opaque, stateless, and verified by a checksum."""

from __future__ import annotations

import base64
import binascii
from hashlib import sha256

from lmkv.errors import BadPageToken

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_CHECK_BYTES = 8


def page_limit(page_size: int) -> int:
    """The number of entries of a page, from the requested size."""
    return min(page_size, MAX_PAGE_SIZE) if page_size > 0 else DEFAULT_PAGE_SIZE


def page_token(call: str, last: str) -> str:
    """The token with which `call` continues after the entry `last`."""
    return base64.urlsafe_b64encode(_check(call, last) + last.encode()).decode()


def read_page_token(call: str, token: str) -> str:
    """The entry after which the page begins; empty for the first page. Raises `BadPageToken`."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        last = raw[_CHECK_BYTES:].decode()
    except (binascii.Error, UnicodeError):
        raw, last = b"", ""
    if raw[:_CHECK_BYTES] != _check(call, last):
        raise BadPageToken(f"page_token was not made by {call}; leave it empty for the first page", call=call)
    return last


def _check(call: str, last: str) -> bytes:
    return sha256(f"{call}\0{last}".encode()).digest()[:_CHECK_BYTES]
