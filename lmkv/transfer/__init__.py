"""Moves bytes between the memories of two nodes (docs/transfer.md). Used by the node."""

from lmkv.transfer.channel import Channel, Copy, End
from lmkv.transfer.channels import Channels, names_of, open_channel

__all__ = ["Channel", "Channels", "Copy", "End", "names_of", "open_channel"]
