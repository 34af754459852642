"""The server side of `PeerService`: what other nodes may read of this one.

Imports `handoff`, `fetch` and what is below. Start with `service.PeerService`; `build` composes all.
"""
