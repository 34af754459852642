"""The envelope of channel metadata: checksum, channel, owner and memory region."""

from __future__ import annotations

import struct
from hashlib import sha256

from lmkv.errors import ChannelUnsupported, WrongInstance
from lmkv.transfer.channel import ChannelEnd, Region

_DIGEST_BYTES = 8
_HEAD = struct.Struct("!HHQQ")  # sizes of channel name and owner name, address and size of the owner's pool


def wrap(channel: str, end: ChannelEnd, payload: bytes) -> bytes:
    """Encodes the metadata of a channel of the local node."""
    names = channel.encode(), end.name.encode()
    head = _HEAD.pack(*map(len, names), end.pool.address, end.pool.size_bytes)
    return _sealed(b"".join((head, *names, payload)))


def unwrap(channel: str, owner: str, metadata: bytes) -> tuple[Region, bytes]:
    """Decodes the owner's pool and the payload.

    Raises `ChannelUnsupported` if the metadata is damaged or of another channel, `WrongInstance` if not of `owner`.
    """
    content = metadata[_DIGEST_BYTES:]
    if len(content) < _HEAD.size or _sealed(content) != metadata:
        raise ChannelUnsupported("the channel metadata is damaged, or of another version of lmkv", channel=channel)
    channel_size, owner_size, address, size_bytes = _HEAD.unpack_from(content)
    names = content[_HEAD.size : _HEAD.size + channel_size + owner_size]
    found, found_owner = (part.decode(errors="replace") for part in (names[:channel_size], names[channel_size:]))
    if found != channel:
        raise ChannelUnsupported(f"the channel metadata is of {found!r}, not of {channel!r}", channel=channel)
    if found_owner != owner:
        raise WrongInstance(f"the channel metadata is of {found_owner}, not of {owner}", peer=owner)
    return Region(address=address, size_bytes=size_bytes), content[_HEAD.size + len(names) :]


def _sealed(content: bytes) -> bytes:
    return sha256(content).digest()[:_DIGEST_BYTES] + content
