"""Moves bytes between the memories of two nodes (docs/transfer.md). Used by the node."""

from lmkv.transfer.channel import Channel, Copy, open_channel

__all__ = ["Channel", "Copy", "open_channel"]
