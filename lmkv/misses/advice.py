"""What to change for each reason of a miss. Used by `lmkv explain`; docs/operate/misses.md has the same table. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lmkv.misses.reason import MissReason

ADVICE: Mapping[MissReason, str] = {
    MissReason.NEVER_STORED: "nothing, if the tokens are new; across restarts: persist_pool, local_disk",
    MissReason.EVICTED_BY_STORE: "raise max_local_cpu_size, or add local_disk or remote_url",
    MissReason.EVICTED_BY_FETCH: "raise max_local_cpu_size, or route a session to one instance",
    MissReason.EVICTED_BY_ORDER: "move or drain to an instance with free memory",
    MissReason.EVICTED_FROM_TIER: "raise max_local_disk_size, or add remote_url",
    MissReason.CLEARED: "find the reset or the clear: engine's log, lmkv ops",
    MissReason.DROPPED: "find the move or the clear: lmkv ops",
    MissReason.DAMAGED: "check the memory and disks of the host; the node's log names the chunks",
    MissReason.TIER_DOWN: "repair the folder, the store or the coordinator that the node's log names",
    MissReason.PEER_UNREACHABLE: "check the network between instances: p2p_host, p2p_port",
    MissReason.SLOWER: "nothing; refuse_slow_fetches: false loads it anyway",
    MissReason.BELOW_MINIMUM: "lower min_retrieve_tokens or min_fetch_tokens",
    MissReason.TOO_LARGE: "raise max_local_cpu_size: an engine may hold half of the pool",
    MissReason.BEHIND_GAP: "see the part before it",
    MissReason.OTHER_NAMESPACE: "nothing: KV depends on the adapter and on the weights",
    MissReason.OTHER_SALT: "one cache_salt for the users who may share",
    MissReason.SKIPPED: "raise max_local_cpu_size: stores found no free memory",
    MissReason.LOAD_FAILED: "read the node's log at that time",
    MissReason.LOOKUP_TIMEOUT: "give the node more CPU time, or raise lookup_timeout",
    MissReason.NODE_LOST: "read why the node ended: node.log",
    MissReason.NODE_SUSPECT: "give the node more CPU time, or raise lookup_timeout",
    MissReason.UNCACHEABLE: "for ends of prompts: save_partial_chunks: true",
}
