"""Fetches of chunks from peers: which holder is asked for which chunk, reads, verification and commit.

Imports `peers` and `cache`. Start with `fetcher.Peers`.
"""
