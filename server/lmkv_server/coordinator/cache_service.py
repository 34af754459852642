"""CacheService: translates between those who ask for chunks and the layout map."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from lmkv.errors import BadTokens
from lmkv.keys import MAX_KEYS, ChunkKey, Tokens, as_tokens, chunk_keys, root_key, split_keys
from lmkv.spec import KvSpec
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import cache_service_pb2_grpc as pb_grpc
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.layout_map import Match
from lmkv_server.coordinator.registry import Registry
from lmkv_server.coordinator.unimplemented import unimplemented, unimplemented_stream

LOCATIONS = {
    chunk_pb2.TIER_GPU: "GPU",
    chunk_pb2.TIER_HOST: "LocalCPUBackend",
    chunk_pb2.TIER_DISK: "LocalDiskBackend",
    chunk_pb2.TIER_REMOTE: "RemoteBackend",
}
"""The tiers in LMCache's words."""


class CacheService(pb_grpc.CacheServiceServicer):
    """The handlers. One event loop runs them all; the registry is its alone."""

    def __init__(self, registry: Registry, cluster_secret: bytes = b"") -> None:
        self._registry = registry
        self._secret = cluster_secret

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        matches = self._by_keys(request) if request.chunk_keys else self._by_tokens(request)
        return pb.LookupResponse(
            holders=[self._to_proto(match) for match in matches],
            revision=self._registry.layout.revision,
            partial=self._registry.is_partial(time.monotonic()),
        )

    LookupStream = unimplemented_stream("LookupStream")
    Move = unimplemented("Move")
    Pin = unimplemented("Pin")
    Unpin = unimplemented("Unpin")
    ListPins = unimplemented("ListPins")
    Clear = unimplemented("Clear")
    Watch = unimplemented_stream("Watch")

    def _by_keys(self, request: pb.LookupRequest) -> list[Match]:
        if request.tokens:
            raise BadTokens("chunks are named by tokens and by chunk_keys; use one of the two")
        if request.model_name:
            self._registry.instances.specs(request.model_name)
        return self._registry.layout.lookup(split_keys(request.chunk_keys), request.excluded_instance_id)

    def _by_tokens(self, request: pb.LookupRequest) -> list[Match]:
        raw = np.array(request.tokens, dtype=np.int32)
        if not raw.size:
            return []
        if raw.min() < 0:
            raise BadTokens(f"token id {raw.min()} is negative", token=raw.min())
        matches: list[Match] = []
        for spec in self._registry.instances.specs(request.model_name):
            keys = self._keys(raw.astype(np.uint32), spec, request)
            matches += self._registry.layout.lookup(keys, request.excluded_instance_id)
        return longest_first(matches)

    def _keys(self, tokens: Tokens, spec: KvSpec, request: pb.LookupRequest) -> list[ChunkKey]:
        if tokens.size > MAX_KEYS * spec.chunk_size:
            raise BadTokens(f"{tokens.size} tokens make more than {MAX_KEYS} chunks", limit=MAX_KEYS)
        root = root_key(spec.fingerprint, cache_salt=request.cache_salt, lora=request.lora_name, secret=self._secret)
        return chunk_keys(as_tokens(tokens, spec.vocab_size), root, spec.chunk_size, partial=True)

    def _to_proto(self, match: Match) -> pb.Holder:
        instance = self._registry.instances.find(match.instance_id)
        assert instance is not None, "who holds chunks is registered"
        return pb.Holder(
            instance_id=match.instance_id,
            epoch=instance.said.epoch,
            peer_address=instance.said.peer_address,
            matched_chunk_count=match.chunk_count,
            matched_token_count=match.token_count,
            runs=[
                pb.TierRun(
                    tier=chunk_pb2.Tier.ValueType(run.tier),
                    location=LOCATIONS[chunk_pb2.Tier.ValueType(run.tier)],
                    chunk_count=run.chunk_count,
                    token_count=run.token_count,
                )
                for run in match.runs
            ],
        )


def longest_first(matches: Iterable[Match]) -> list[Match]:
    """The longest match of each instance, longest first, then by instance id."""
    ranked = sorted(matches, key=lambda match: (-match.token_count, match.instance_id))
    best: dict[str, Match] = {}
    for match in ranked:
        best.setdefault(match.instance_id, match)
    return list(best.values())
