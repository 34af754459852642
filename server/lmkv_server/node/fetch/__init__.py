"""Transfers of chunks from peers into this node: fetches, and the pipeline that handoffs use too.

Imports `tiers`, `peers` and `cache`. Start with `pipeline.TransferPipeline`, then `tier.PeerFetcher`.
"""
