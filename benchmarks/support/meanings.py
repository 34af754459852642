"""Descriptions of the rows of results, for the tables in the documentation."""

from __future__ import annotations

import re

_MEANINGS = {
    r"(peer|own)_ttft_ratio": "TTFT of a hit in {}, over the TTFT of a miss",
    r"ttft_cold_ms": "TTFT of a miss",
    r"ttft_prefix_hit_ms": "TTFT of a hit in vLLM's prefix cache",
    r"ttft_(own|peer)_ms": "TTFT of a hit in {}",
    r"ttft_identical": "prompts whose completions are equal in all cases",
    r"step_(prefix|own|peer)_lookup_ms": "part of the TTFT, {}: lookup",
    r"step_(prefix|own|peer)_fetch_ms": "part of the TTFT, {}: peer's pool to own pool, verified",
    r"step_(prefix|own|peer)_load_ms": "part of the TTFT, {}: pool to pages, beyond the fetch",
    r"step_(prefix|own|peer)_compute_ms": "part of the TTFT, {}: last tokens computed",
    r"step_(prefix|own|peer)_rest_ms": "part of the TTFT, {}: HTTP, tokens, vLLM's loop",
    r"miss_overhead": "throughput that lmkv costs when every prompt is a miss",
    r"miss_tokens_per_s": "throughput with lmkv, every prompt a miss",
    r"miss_cpu_us_per_token": "processor time of engine and node, every prompt a miss",
    r"miss_ttft_overhead_ms": "TTFT added to a miss by the lookup and the store",
    r"hit_vs_cold_overhead_ms": "TTFT of a hit less that of a miss, at the prompt length where it is worst",
    r"(own|peer)_hit_ttft_ms(?:_10|_18|_64)?": "TTFT of a short prompt, hit in {}",
    r"idle_cpu_percent": "processor time of an idle engine and its node, less that of vLLM alone",
    r"hook_idle_us": "`build_connector_meta` with nothing to do",
    r"hooks_idle_step_us": "all hooks of a step with nothing to do",
    r"store(?:_\d_threads)?_vs_memcpy": "a worker stores: pages into the pool, checksums included",
    r"load(?:_\d_threads)?_vs_memcpy": "a worker loads: pool into the pages",
    r"host_gather_vs_memcpy": "kernel, pages to chunks, checksums included: whole tiles",
    r"host_scatter_vs_memcpy": "kernel, chunks to pages: whole tiles",
    r"host_(gather|scatter)_packed_vs_memcpy": "kernel, {}: token-major, of the CPU backend's packed blocks",
    r"host_(gather|scatter)_hnd_vs_memcpy": "kernel, {}: token-major, blocks of 16, heads outside",
    r"host_(gather|scatter)_nhd_vs_memcpy": "kernel, {}: token-major, blocks of 16, heads within tokens",
    r"host_(gather|scatter)_latent_vs_memcpy": "kernel, {}: MLA latents",
    r"gpu_(gather|scatter)_[a-z]+_vs_memcpy": "CUDA kernel within the device, {}",
    r"gpu_gather_summed_[a-z]+_vs_memcpy": "CUDA kernel within the device, pages to chunks, checksums included",
    r"gpu_store_(direct|staged)_vs_memcpy": "pages on a GPU into pinned memory, checksums included, {}",
    r"gpu_load_(direct|staged)_vs_memcpy": "pinned memory into pages on a GPU, {}",
    r"gpu_checksum_cost_(direct|staged)": "time that checksums add to a store from a GPU, {}",
    r"checksum_cost": "time that checksums add to a gather",
    r"(shm|nixl|tcp|ucx|mooncake)_fetch_vs_\w+": "fetch from another node by {}: acquire, read, verify, commit",
    r"(shm|nixl|tcp|ucx|mooncake)_read_vs_\w+": "the same bytes by {}, the channel's read alone",
    r"(shm|nixl|tcp|ucx|mooncake)_cpu_s_per_gb": "processor time of both ends for fetches by {}",
    r"(shm|nixl|tcp|ucx|mooncake)_idle_cpu_percent": "processor time of both ends, connected by {} and idle",
    r"keys_100k_tokens_ms": "keys of 100,000 tokens",
    r"lookup_p\d+_ms": "the engine asks its node: hit in the node's pool",
    r"lookup_peer_p\d+_ms": "the engine asks its node: hit at a peer",
    r"lookup_miss_p\d+_ms": "the engine asks its node: miss",
    r"cache_lookup_p\d+_ms": "a client asks the coordinator, by keys",
    r"cache_lookup_miss_p\d+_ms": "a client asks the coordinator, by keys: miss",
    r"cache_lookup_tokens_p\d+_ms": "a client asks the coordinator, by tokens",
    r"map_bytes_per_pair": "memory of the layout map for each pair of a chunk and its holder",
    r"report_ingest_per_s": "changes in reports that the layout map applies per second of one core",
    r"lookup_stream_p\d+_ms": "40 chunks among a million, over a stream",
    r"lookup_unary_p\d+_ms": "40 chunks among a million, a unary call each",
    r"lookup_last_of_64_p50_ms": "40 chunks that only the last of 64 instances holds, over a stream",
    r"lookup_rps_16": "40 chunks among a million, 16 in flight over one stream",
    r"lookup_server_cpu_us": "processor time of the coordinator for each such lookup",
    r"lookup_rps_16_streams": "40 chunks among a million, from 16 clients, each with a stream",
    r"lookup_server_cpu_us_streams": "processor time of the coordinator for each such lookup, 16 streams",
    r"http_lookup_ms": "`POST /lookup` by tokens, as JSON",
    r"rebuild_2m_s": "coordinator restarts: time until it knows 2 million chunks of 50 instances again",
    r"death_pause_ms": "longest lookup after an instance with a million chunks fails",
    r"death_reclaim_s": "time until the memory of its chunks is free",
    r"doc_qa_(?:ttft|round)_gain": "engine 2 reads what engine 1 has read: time saved",
    r"doc_qa_(?:ttft|round)_s": "engine 2 reads what engine 1 has read",
    r"doc_qa_query_(?:ttft|round)_gain": "engine 2 answers questions: time saved",
    r"doc_qa_query_(?:ttft|round)_s": "engine 2 answers questions",
    r"doc_qa_own_query_(?:ttft|round)_gain": "engine 1 answers questions: time saved",
    r"doc_qa_own_query_(?:ttft|round)_s": "engine 1 answers questions",
    r"doc_qa_identical": "completions that are equal at both engines",
    r"(lmkv|vllm_offloading|lmcache)_cold_ms": "{}: TTFT of a miss",
    r"(lmkv|vllm_offloading|lmcache)_own_ms": "{}: TTFT of a hit in host memory",
    r"(lmkv|vllm_offloading|lmcache)_peer_ms": "{}: TTFT of a hit at the other engine",
    r"(lmkv|vllm_offloading|lmcache)_idle_cpu_percent": "{}: processor time of both engines, idle",
    r"(alone|lmkv|vllm_offload|lmcache)_turn_(\d+)_ms": "{}: TTFT in turn {} of a chat",
    r"(alone|lmkv|vllm_offload|lmcache)_kept": "{}: hit rate in tokens, from the second turn on",
    r"(alone|lmkv|vllm_offload|lmcache)_identical": "{}: answers equal to those of the engine without a connector",
    r"pd_(ttft|second_token|itl|total)_vs_(?:one_engine|nixlconnector|lmcache)": "lmkv with disaggregated prefill: {}",
    r"pd_transfer_vs_(?:nixlconnector|lmcache)": "latency that the transfer from prefill to decode adds",
    r"pd_transfer_share_of_ttft": "latency that the transfer adds, over the TTFT",
    r"pd_seam_ms": "from the first token (prefill engine) to the second (decode engine)",
    r"pd_(ttft|total)_after_aborts": "prefill and decode in two, after 100 clients left, in a small buffer: {}",
    r"pd_identical": "prompts with equal completions at all systems",
    r"pd_rpcs_per_request": "RPCs between the two nodes for each prompt",
    r"pd_handoff_gb_per_s": "the decode's node reads from the prefill's: RPCs, checksums and commits included",
    r"(conversation|tool_agent|api|scan|loop)_unbounded": "{}: highest possible hit rate",
    r"(conversation|tool_agent|api|scan|loop)_(500k|2m|8m)_(arc|s3_fifo|sieve|two_queues)": "{}: hit rate, {}, {}",
    r"lmcache_report_ingest_per_s": "LMCache's controller: changes that it applies per second of one core",
    r"lmcache_map_bytes_per_pair": "LMCache's controller: memory for each pair of a chunk and its holder",
    r"lmcache_lookup_p\d+_ms": "LMCache's controller: 40 chunks among a million, by ZeroMQ",
    r"scale_join_s": "time until a coordinator knows every chunk of a fleet that starts, 10,000 chunks per node",
    r"scale_bytes_per_chunk": "memory of the coordinator per chunk, streams and nodes included",
    r"scale_cpu_percent": "processor time of the coordinator while all nodes send heartbeats, store and evict",
    r"scale_lookup_p\d+_ms": "lookup of 40 chunks over a stream, at the same time",
    r"shared_join_s": "time until two coordinators know every chunk of a fleet that starts",
    r"shared_cpu_percent": "processor time of two coordinators, same load as `scale_cpu_percent`",
    r"shared_store_cpu_percent": "processor time of `redis-server` at the same time",
    r"shared_news_p\d+_ms": "time from a commit at a node until both coordinators report the chunk",
    r"shared_whole_s": "time until a coordinator that was killed knows every chunk again",
    r"scale_whole_s": "time until a coordinator that was killed knows every chunk again",
    r"lmcache_http_lookup_ms": "LMCache's controller: `POST /lookup` by tokens, as JSON",
}
"""By pattern of the row's name, without the length of its prompts."""

_IN_BENCHMARK = {
    ("control_plane", "lookup_400_p50_ms"): "400 chunks among a million, over a stream",
}
"""Rows of one benchmark that another one has too, for something else."""

_WORDS = {
    "own": "the node's pool",
    "peer": "a peer's pool",
    "prefix": "vLLM's prefix cache",
    "gather": "pages to chunks",
    "scatter": "chunks to pages",
    "lmkv": "lmkv",
    "vllm_offloading": "vLLM's offloading with its p2p tier",
    "lmcache": "LMCache",
    "alone": "engine without a connector",
    "vllm_offload": "vLLM's offloading",
    "ttft": "TTFT",
    "second_token": "time to the second token",
    "itl": "time between tokens",
    "total": "time to the last token",
    "direct": "by the kernel itself",
    "staged": "through a staging buffer and DMA",
    "shm": "shared memory",
    "nixl": "NIXL",
    "tcp": "plain TCP",
    "ucx": "UCX",
    "mooncake": "Mooncake",
    "conversation": "conversations",
    "tool_agent": "agents with tools",
    "api": "programs",
    "scan": "conversations and documents read once",
    "loop": "documents in turn",
    "500k": "a pool of 500,000 tokens",
    "2m": "a pool of 2 million tokens",
    "8m": "a pool of 8 million tokens",
    "arc": "ARC",
    "s3_fifo": "S3-FIFO",
    "sieve": "SIEVE",
    "two_queues": "2Q",
}
_LENGTH = re.compile(r"_(\d{3,})(?=_|$)")


def meaning_of(name: str, benchmark: str = "") -> str:
    """The description of a row. Raises `KeyError` if there is none."""
    if meaning := _IN_BENCHMARK.get((benchmark, name)):
        return meaning
    plain = _LENGTH.sub("", name)
    for pattern, meaning in _MEANINGS.items():
        if match := re.fullmatch(pattern, plain):
            words = meaning.format(*(group if group.isdigit() else _WORDS[group] for group in match.groups()))
            length = _LENGTH.search(name)
            of_chunks = "lookup" in name and not name.startswith("http")
            unit = "nodes" if name.startswith("scale") else "chunks" if of_chunks else "tokens"
            return f"{words}; {length[1]} {unit}" if length else words
    raise KeyError(name)
