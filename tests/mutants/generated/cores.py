"""The modules that `make mutation` mutates, and the tests of each.

Their tests open no sockets and start no processes, so that a run takes about a second. Tests that start processes would
run these without the mutant. Most modules are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_LMKV = "tests/lmkv/"
_CORE = "tests/server/coordinator/core/"
_STORE = "tests/server/coordinator/layout_store/"
_NODE = "tests/server/node/"
_CACHE = "tests/server/node/cache/"
_PROXY = "tests/server/proxy/"
_SCHEDULER = "tests/client/connector/scheduler/"

CORES: Mapping[str, Sequence[str]] = {
    "lmkv.auth.token_bucket": (f"{_LMKV}auth/test_token_bucket.py",),
    "lmkv.config.remote_url": (f"{_LMKV}config/test_remote_url.py",),
    "lmkv.end_index": (f"{_LMKV}test_end_index.py", f"{_CORE}test_partial_chunks.py"),
    "lmkv.hints": (f"{_LMKV}test_hints.py",),
    "lmkv.keys": (f"{_LMKV}test_keys.py",),
    "lmkv.misses": (f"{_LMKV}misses/test_memory.py",),
    "lmkv.spec": (f"{_LMKV}test_spec.py", f"{_CORE}test_match.py"),
    "lmkv.prompt": (f"{_LMKV}test_prompt.py", f"{_CORE}test_match.py", f"{_CORE}test_partial_chunks.py"),
    "lmkv.rpc.frames": (f"{_LMKV}rpc/test_frames.py",),
    "lmkv.transfer.bandwidth": (f"{_LMKV}transfer/test_bandwidth.py",),
    "lmkv.transfer.choice": (f"{_LMKV}transfer/test_choice.py",),
    "lmkv_client.engine.hit_sources": ("tests/client/engine/test_hit_sources.py",),
    "lmkv_client.engine.speeds": ("tests/client/engine/test_speeds.py",),
    "lmkv_client.engine.write_credits": ("tests/client/engine/test_write_credits.py",),
    "lmkv_server.coordinator.core.history": (f"{_CORE}test_history.py",),
    "lmkv_server.coordinator.core.instances": (
        f"{_CORE}test_instances.py",
        f"{_CORE}test_registrations.py",
        f"{_CORE}test_join_admission.py",
    ),
    "lmkv_server.coordinator.core.layout_map": (
        f"{_CORE}test_layout_queries.py",
        f"{_CORE}test_partial_chunks.py",
        f"{_CORE}test_layout_map.py",
    ),
    "lmkv_server.coordinator.core.match": (f"{_CORE}test_match.py", f"{_CORE}test_partial_chunks.py"),
    "lmkv_server.coordinator.core.models": (f"{_CORE}test_models.py", f"{_CORE}test_instances.py"),
    "lmkv_server.coordinator.layout_store.follower": (f"{_STORE}test_follower.py", f"{_STORE}test_doubts.py"),
    "lmkv_server.node.cache.allocator": (f"{_CACHE}test_allocator.py",),
    "lmkv_server.node.cache.eviction": (f"{_CACHE}test_eviction.py", f"{_CACHE}test_arc.py"),
    "lmkv_server.node.cache.host": (f"{_CACHE}test_host.py", f"{_CACHE}test_pins.py", f"{_CACHE}test_events.py"),
    "lmkv_server.node.cache.learned": (f"{_CACHE}test_learned.py", f"{_CACHE}test_eviction.py"),
    "lmkv_server.node.cache.warm_start": (f"{_CACHE}test_warm_start.py",),
    "lmkv_server.node.cache.events": (f"{_CACHE}test_events.py",),
    "lmkv_server.node.cache.pins": (f"{_CACHE}test_pins.py",),
    "lmkv_server.node.commands.journal": (f"{_NODE}commands/test_journal.py",),
    "lmkv_server.node.fetch.scheduler": (f"{_NODE}fetch/test_windows.py", f"{_NODE}fetch/test_scheduler.py"),
    "lmkv_server.node.fleet.shard": (f"{_NODE}fleet/test_shard.py",),
    "lmkv_server.node.hints.retentions": (f"{_NODE}hints/test_retentions.py",),
    "lmkv_server.node.serving.read_grants": (f"{_NODE}serving/test_read_grants.py",),
    "lmkv_server.node.tiers.disk.folder": (f"{_NODE}tiers/disk/test_folder.py", f"{_NODE}tiers/disk/test_volume.py"),
    "lmkv_server.node.tiers.disk.volume": (f"{_NODE}tiers/disk/test_volume.py",),
    "lmkv_server.node.tiers.encryption_header": (f"{_NODE}tiers/test_encryption_header.py",),
    "lmkv_server.node.tiers.remote.store": (f"{_NODE}tiers/remote/test_store.py",),
    "lmkv_server.proxy.pd.joiner": (f"{_PROXY}pd/test_joined_responses.py",),
    "lmkv_server.proxy.pd.parameters": (f"{_PROXY}pd/test_parameters.py",),
    "lmkv_server.proxy.routing.pools": (f"{_PROXY}routing/test_pools.py", f"{_PROXY}routing/test_recent_picks.py"),
    "lmkv_server.proxy.routing.prompt": (f"{_PROXY}routing/test_prompt.py",),
    "lmkv_server.proxy.statistics": (f"{_PROXY}test_statistics.py",),
    "lmkv_server.proxy.openai": (f"{_PROXY}test_openai.py",),
    "lmkv_server.webhook.injection": ("tests/server/webhook/test_injection.py",),
}
