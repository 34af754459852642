"""The client side of `PeerService`: connections to other nodes.

Start with `connection_pool.PeerConnectionPool`.
"""
