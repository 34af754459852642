"""The server side of `PeerService`: other nodes acquire grants here and read this node's pool.

Start with `service.PeerService`.
"""
