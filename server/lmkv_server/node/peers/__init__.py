"""The client side of `PeerService`: connections to other nodes, and the checks of what these offer.

Imports no other package of the node. Start with `connection.PeerConnection`.
"""
