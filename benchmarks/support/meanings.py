"""Descriptions of the rows of results, for the tables in the documentation."""

from __future__ import annotations

import re

_MEANINGS = {
    r"(peer|own)_ttft_ratio": "TTFT where {} has it, over the cold TTFT",
    r"ttft_cold_ms": "TTFT, nothing cached",
    r"ttft_prefix_hit_ms": "TTFT, vLLM's own prefix cache has it",
    r"ttft_(own|peer)_ms": "TTFT, {} has it",
    r"ttft_identical": "prompts whose completions were all the same",
    r"step_(prefix|own|peer)_lookup_ms": "part of the TTFT, {}: lookup",
    r"step_(prefix|own|peer)_fetch_ms": "part of the TTFT, {}: peer's pool to own pool, verified",
    r"step_(prefix|own|peer)_load_ms": "part of the TTFT, {}: pool to pages, beyond the fetch",
    r"step_(prefix|own|peer)_compute_ms": "part of the TTFT, {}: last tokens computed",
    r"step_(prefix|own|peer)_rest_ms": "part of the TTFT, {}: HTTP, tokens, vLLM's loop",
    r"miss_overhead": "throughput lost to lmkv where every prompt is new",
    r"miss_tokens_per_s": "throughput with lmkv, every prompt new",
    r"miss_cpu_us_per_token": "processor time of engine and node, every prompt new",
    r"miss_ttft_overhead_ms": "TTFT added by a lookup that finds nothing, and by the store",
    r"hit_vs_cold_overhead_ms": "TTFT that a hit adds to computing, where it adds most",
    r"(own|peer)_hit_ttft_ms(?:_10|_18|_64)?": "TTFT of a short prompt, {} has it",
    r"idle_cpu_percent": "processor time of an idle engine and its node, beyond vLLM's own",
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
    r"gpu_checksum_cost_(direct|staged)": "what summing adds to a store from a GPU, {}",
    r"checksum_cost": "what summing adds to a gather",
    r"(shm|nixl|tcp|ucx|mooncake)_fetch_vs_\w+": "fetch from another node by {}: acquire, read, verify, commit",
    r"(shm|nixl|tcp|ucx|mooncake)_read_vs_\w+": "the same bytes by {}, the channel's read alone",
    r"(shm|nixl|tcp|ucx|mooncake)_cpu_s_per_gb": "processor time of both ends for fetches by {}",
    r"(shm|nixl|tcp|ucx|mooncake)_idle_cpu_percent": "processor time of both ends, connected by {} and idle",
    r"keys_100k_tokens_ms": "keys of 100,000 tokens",
    r"lookup_p\d+_ms": "engine asks its node, which has it all",
    r"lookup_peer_p\d+_ms": "engine asks its node, another node has it",
    r"lookup_miss_p\d+_ms": "engine asks its node, nobody has it",
    r"cache_lookup_p\d+_ms": "anybody asks the coordinator, by keys",
    r"cache_lookup_miss_p\d+_ms": "anybody asks the coordinator, by keys; nobody has it",
    r"cache_lookup_tokens_p\d+_ms": "anybody asks the coordinator, by tokens",
    r"map_bytes_per_pair": "memory of the layout map for each pair of a chunk and its holder",
    r"report_ingest_per_s": "changes that reports carry into the layout map, of one core",
    r"lookup_stream_p\d+_ms": "40 chunks among a million, over a standing call",
    r"lookup_unary_p\d+_ms": "40 chunks among a million, a call each",
    r"lookup_last_of_64_p50_ms": "40 chunks that the last of 64 instances alone has, over a standing call",
    r"lookup_rps_16": "40 chunks among a million, 16 in flight over one standing call",
    r"lookup_server_cpu_us": "processor time of the coordinator for each of them",
    r"lookup_rps_16_streams": "40 chunks among a million, from 16 clients, each with a standing call",
    r"lookup_server_cpu_us_streams": "processor time of the coordinator for each of those",
    r"http_lookup_ms": "`POST /lookup` by tokens, as JSON",
    r"rebuild_2m_s": "coordinator restarts: until it knows 2 million chunks of 50 instances again",
    r"death_pause_ms": "longest lookup after an instance with a million chunks died",
    r"death_reclaim_s": "until the memory of its chunks was back",
    r"doc_qa_(?:ttft|round)_gain": "engine 2 reads what engine 1 has read: time saved",
    r"doc_qa_(?:ttft|round)_s": "engine 2 reads what engine 1 has read",
    r"doc_qa_query_(?:ttft|round)_gain": "engine 2 answers questions: time saved",
    r"doc_qa_query_(?:ttft|round)_s": "engine 2 answers questions",
    r"doc_qa_own_query_(?:ttft|round)_gain": "engine 1 answers questions: time saved",
    r"doc_qa_own_query_(?:ttft|round)_s": "engine 1 answers questions",
    r"doc_qa_identical": "completions that are the same from both engines",
    r"(lmkv|vllm_offloading|lmcache)_cold_ms": "{}: TTFT, nothing cached",
    r"(lmkv|vllm_offloading|lmcache)_own_ms": "{}: TTFT, the own host memory has it",
    r"(lmkv|vllm_offloading|lmcache)_peer_ms": "{}: TTFT, the other engine has it",
    r"(lmkv|vllm_offloading|lmcache)_idle_cpu_percent": "{}: processor time of both engines, idle",
    r"(alone|lmkv|vllm_offload|lmcache)_turn_(\d+)_ms": "{}: TTFT in turn {} of a chat",
    r"(alone|lmkv|vllm_offload|lmcache)_kept": "{}: tokens of later turns that were not computed again",
    r"(alone|lmkv|vllm_offload|lmcache)_identical": "{}: answers that are the engine's alone",
    r"pd_(ttft|second_token|itl|total)_vs_(?:one_engine|nixlconnector|lmcache)": "prefill and decode in two: {}",
    r"pd_transfer_vs_(?:nixlconnector|lmcache)": "what the way from prefill to decode adds",
    r"pd_transfer_share_of_ttft": "what the way from prefill to decode adds, over the TTFT",
    r"pd_seam_ms": "from the first token, of the prefill, to the second, of the decode",
    r"pd_(ttft|total)_after_aborts": "prefill and decode in two, after 100 clients left, in a small buffer: {}",
    r"pd_identical": "prompts that all systems completed alike",
    r"pd_rpcs_per_request": "calls between the two nodes, for each prompt",
    r"pd_handover_gb_per_s": "decode's node reads from the prefill's: calls, checksums and commits included",
    r"(conversation|tool_agent|api|scan|loop)_unbounded": "{}: tokens that were sent before, so all that can be found",
    r"(conversation|tool_agent|api|scan|loop)_(500k|2m|8m)_(arc|s3_fifo|sieve|two_queues)": "{}: found in {} by {}",
    r"lmcache_report_ingest_per_s": "LMCache's controller: changes that it takes in, of one core",
    r"lmcache_map_bytes_per_pair": "LMCache's controller: memory for each pair of a chunk and its holder",
    r"lmcache_lookup_p\d+_ms": "LMCache's controller: 40 chunks among a million, by ZeroMQ",
    r"scale_join_s": "until a coordinator knows all of a fleet that starts, 10,000 chunks a node",
    r"scale_bytes_per_chunk": "what the coordinator takes for each chunk, its nodes included",
    r"scale_cpu_percent": "processor time of the coordinator while all nodes beat, store and evict",
    r"scale_lookup_p\d+_ms": "40 chunks, over a standing call, beside all that",
    r"shared_join_s": "until two coordinators know all of a fleet that starts",
    r"shared_cpu_percent": "processor time of two coordinators together while all nodes beat, store and evict",
    r"shared_store_cpu_percent": "processor time of `redis-server` meanwhile",
    r"shared_news_p\d+_ms": "from when a node has a chunk until both coordinators say so",
    r"shared_whole_s": "until one of them that was killed knows everything again",
    r"scale_whole_s": "until a coordinator that was killed knows everything again",
    r"lmcache_http_lookup_ms": "LMCache's controller: `POST /lookup` by tokens, as JSON",
}
"""By pattern of the row's name, without the length of its prompts."""

_IN_BENCHMARK = {
    ("control_plane", "lookup_400_p50_ms"): "400 chunks among a million, over a standing call",
}
"""Rows of one benchmark that another one has too, for something else."""

_WORDS = {
    "own": "the own pool",
    "peer": "a peer",
    "prefix": "vLLM's prefix cache",
    "gather": "pages to chunks",
    "scatter": "chunks to pages",
    "lmkv": "lmkv",
    "vllm_offloading": "vLLM's offloading with its p2p tier",
    "lmcache": "LMCache",
    "alone": "the engine alone",
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
    "conversation": "people who talk",
    "tool_agent": "agents with tools",
    "api": "programs",
    "scan": "people, and documents read once",
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
