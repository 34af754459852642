"""Lookups of prompts in a pool alone, for the engine of a session."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.keys import ChunkKey
from lmkv.prompt import Prompt
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.session import MAX_EXTENTS, EngineSession, LookupLease


def open_lookup(session: EngineSession, tier: HostTier, lookup_id: str, keys: Sequence[ChunkKey]) -> LookupLease:
    """Begins a lookup, and holds what the pool has of the prompt, at most as many chunks as an answer can name."""
    lease = session.begin(lookup_id)
    prompt = Prompt(session.spec, keys).first(MAX_EXTENTS)
    found = PromptLookup(tier, PartialChunks(), prompt, session.holdable_bytes).result()
    session.keep(lease, found.items.keys, found.own)
    return lease
