"""Loads of hits into the engine's pages: what they copy, which are part of a step, and how they end.

Imports `lmkv`, `connector.messages` and its siblings' state of requests and lookups. Read `loads.Loads` first.
"""
