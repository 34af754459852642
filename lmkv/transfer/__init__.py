"""Transfers bytes between the pools of two nodes (docs/contribute/transfer.md). Used by the node.

`channel` defines the contract of a channel; `channels` chooses one for each peer. Imports `lmkv.pool`, `lmkv.plugins`,
`lmkv.telemetry` and `lmkv.errors`. Start with `channel.Channel`.
"""

from lmkv.transfer.channel import Channel, ChannelEnd, Copy
from lmkv.transfer.channels import Channels, names_of, open_channel

__all__ = ["Channel", "ChannelEnd", "Channels", "Copy", "names_of", "open_channel"]
