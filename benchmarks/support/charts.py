"""What the chart of each benchmark shows, out of its report; `bar_chart` draws it, `benchmarks.tables` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from benchmarks.support.bar_chart import Bar, Chart, Group, Series
from benchmarks.support.meanings import word
from benchmarks.support.policy_table import hit_rates
from benchmarks.support.rows import Report, Row

LMKV = Series("lmkv", "#2f8f6b")
VLLM = Series("vLLM OffloadingConnector", "#3b78c2")
NIXL = Series("vLLM NixlConnector", "#3b78c2")
LMCACHE = Series("LMCache", "#d1781f")
ALONE = Series("engine without a connector", "#9aa3ad")
SECOND = Series("lmkv, second value", "#8b6fc8")

CHANNELS = ("shm", "nixl", "tcp", "tcp_tls", "ucx", "mooncake")
STEPS = {
    "lookup": Series("lookup", "#8b6fc8"),
    "fetch": Series("fetch from the peer, verified", "#d1781f"),
    "load": Series("pool to pages", "#2f8f6b"),
    "compute": Series("last tokens computed", "#3b78c2"),
    "rest": Series("HTTP, tokenizer, vLLM's loop", "#9aa3ad"),
}
HOLDERS = {"prefix": "hit in vLLM's prefix cache", "own": "hit in the node's pool", "peer": "hit in a peer's pool"}


def data_path(report: Report) -> Chart:
    """The steps of the TTFT of a hit."""
    rows = _by_name(report)
    groups = [Group(label, (_steps(rows, holder),)) for holder, label in HOLDERS.items()]
    cold = rows["ttft_cold_ms_4000"].value
    title = f"TTFT of a hit, 4,000 tokens (cache miss: {cold:,.0f} ms)"
    return Chart(title=title, unit="ms", groups=groups)


def channels(report: Report) -> Chart:
    """Throughput of fetches by each channel, beside its limit."""
    fetches = [row for row in report.rows if re.fullmatch(r"[a-z_]+_fetch_vs_\w+", row.name)]
    own_limit = {row.name.partition("_fetch")[0]: row for row in reversed(fetches)}  # the first row of each
    groups = [
        Group(f"{name} (limit: {row.baseline})", (_with_limit(row),))
        for name in CHANNELS
        if (row := own_limit.get(name))
    ]
    return Chart(title="Fetch from another node, throughput", unit="GB/s", groups=groups, limit="limit of the channel")


def hosts(report: Report) -> Chart:
    """Throughput of fetches from another host by each channel."""
    rows = _by_name(report)
    groups = [Group(name, (_bar(LMKV, rows[f"hosts_{name}_fetch"]),)) for name in ("tcp", "ucx", "nixl", "mooncake")]
    return Chart(title="Fetch from another host, throughput", unit="GB/s", groups=groups)


def kernels_cpu(report: Report) -> Chart:
    """Throughput of the copies between pages and chunks, beside memcpy."""
    layouts = {
        "": "vLLM's pages, whole tiles",
        "_packed": "packed blocks of the CPU backend",
        "_hnd": "blocks of 16, heads outside",
        "_nhd": "blocks of 16, heads within tokens",
        "_latent": "MLA latents",
    }
    rows, scatter = _by_name(report), Series("chunks to pages", SECOND.colour)
    gather = Series("pages to chunks, with checksum", LMKV.colour)
    groups = [
        Group(
            label,
            (
                _with_limit(rows[f"host_gather{layout}_vs_memcpy"], gather),
                _with_limit(rows[f"host_scatter{layout}_vs_memcpy"], scatter),
            ),
        )
        for layout, label in layouts.items()
    ]
    return Chart(title="Copies on the host, throughput", unit="GB/s", groups=groups, limit="memcpy")


def kernels_gpu(report: Report) -> Chart:
    """Throughput of stores and loads between pages on a GPU and pinned memory, beside plain copies."""
    rows = _by_name(report)
    store, load = Series("store, with checksum", LMKV.colour), Series("load", SECOND.colour)
    groups = [
        Group(
            label,
            (
                _with_limit(rows[f"gpu_store_{way}_vs_memcpy"], store),
                _with_limit(rows[f"gpu_load_{way}_vs_memcpy"], load),
            ),
        )
        for way, label in (("staged", "through a staging buffer"), ("direct", "by the kernel itself"))
    ]
    return Chart(title="Between a GPU and the pool, throughput", unit="GB/s", groups=groups, limit="plain copy")


def control_plane(report: Report) -> Chart:
    """Latencies of lookups at the coordinator, and at LMCache's controller."""
    labels = {
        "lookup_stream_p50_ms": "40 chunks, stream",
        "lookup_400_p50_ms": "400 chunks, stream",
        "lookup_unary_p50_ms": "40 chunks, unary call",
        "http_lookup_131072_ms": "131,072 tokens, HTTP and JSON",
    }
    rows = _by_name(report)
    groups = [
        Group(label, tuple(_bar(series, rows[row]) for series, row in _both(name) if row in rows))
        for name, label in labels.items()
    ]
    return Chart(title="Lookups among a million chunks, median latency", unit="ms", groups=groups)


def doc_qa(report: Report) -> Chart:
    """Mean TTFT of each round."""
    rows, miss = _by_name(report), Series("cache miss", ALONE.colour)
    hit = Series("cache hit", LMKV.colour)
    first = rows["doc_qa_ttft_s"].baseline_value
    assert first is not None
    labels = {
        "doc_qa_ttft_s": "engine 2 reads the same documents",
        "doc_qa_query_ttft_s": "engine 2 answers questions",
        "doc_qa_own_query_ttft_s": "engine 1 answers questions",
    }
    groups = [Group("engine 1 reads the documents", (Bar(((miss, first),)),))]
    groups += [Group(label, (_bar(hit, rows[name]),)) for name, label in labels.items()]
    return Chart(title="Documents, mean TTFT", unit="s", groups=groups)


def pd(report: Report) -> Chart:
    """What the transfer adds to the latency of a request."""
    rows = _by_name(report)
    groups = []
    for tokens, suffix in ((2048, ""), (4096, "_4096")):
        nixl, lmcache = rows[f"pd_transfer_vs_nixlconnector{suffix}"], rows[f"pd_transfer_vs_lmcache{suffix}"]
        bars = (_bar(LMKV, nixl), _baseline(NIXL, nixl), _baseline(LMCACHE, lmcache))
        groups.append(Group(f"{tokens:,} tokens", bars))
    return Chart(title="Disaggregated prefill: latency that the transfer adds", unit="ms", groups=groups)


def rivals(report: Report) -> Chart:
    """TTFT of hits of three systems."""
    rows = _by_name(report)
    systems = {"lmkv": LMKV, "vllm_offloading": VLLM, "lmcache": LMCACHE}
    groups = [
        Group(
            f"{tokens:,} tokens, {label}",
            tuple(
                _bar(series, rows[name])
                for key, series in systems.items()
                if (name := f"{key}_{at}_ms_{tokens}") in rows
            ),
        )
        for tokens in (2049, 4097)
        for at, label in (("own", "hit in host memory"), ("peer", "hit at the other engine"))
    ]
    return Chart(title="TTFT of a cache hit", unit="ms", groups=groups)


def multi_turn(report: Report) -> Chart:
    """TTFT by turn of a chat."""
    rows = _by_name(report)
    hinted = Series("lmkv with hints", "#8b6fc8")
    systems = {"alone": ALONE, "lmkv": LMKV, "lmkv_hints": hinted, "vllm_offload": VLLM, "lmcache": LMCACHE}
    turns = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"\w+_turn_(\d+)_ms", name))})
    groups = [
        Group(
            f"turn {turn}",
            tuple(
                _bar(series, rows[name]) for key, series in systems.items() if (name := f"{key}_turn_{turn}_ms") in rows
            ),
        )
        for turn in turns
    ]
    title = f"TTFT by turn, {report.settings['users']} chats at a time"
    return Chart(title=title, unit="ms", groups=groups)


def agents(report: Report) -> Chart:
    """TTFT of agents' requests."""
    rows = _by_name(report)
    systems = {"alone": ALONE, "lmkv": LMKV, "vllm_offload": VLLM, "lmcache": LMCACHE}
    routed = {"round_robin": Series("lmkv, two engines in turn", "#8b6fc8"), "kv_aware": LMKV}
    groups = [
        Group(
            f"{label}, {engines}",
            tuple(
                _bar(series, rows[name])
                for key, series in chosen.items()
                if (name := f"{key}_ttft_{percent}_ms") in rows
            ),
        )
        for percent, label in (("p50", "median"), ("p99", "p99"))
        for chosen, engines in ((systems, "one engine"), (routed, "two engines"))
    ]
    groups = [group for group in groups if group.bars]
    return Chart(title=f"TTFT, {report.settings['sessions']} sessions of coding agents", unit="ms", groups=groups)


def eviction(report: Report) -> Chart:
    """Hit rates of the default policy and of LRU, by trace and size of the pool."""
    lru, learned = Series("lru", VLLM.colour), Series("learned, the default", LMKV.colour)
    groups = [
        Group(
            f"{word(trace)}, {word(pool)}",
            (Bar(((lru, rates["lru"]),), rates["opt"]), Bar(((learned, rates["learned"]),), rates["opt"])),
        )
        for (trace, pool), rates in hit_rates(report.rows).items()
    ]
    return Chart(title="Hit rate in tokens", unit="%", groups=groups, limit="OPT, which knows all later requests")


def prefetch(report: Report) -> Chart:
    """TTFT after a pause, with and without a prefetch."""
    rows = _by_name(report)
    pool, after = Series("hit in the pool", VLLM.colour), Series("after a prefetch", LMKV.colour)
    without = Series("without a prefetch", ALONE.colour)
    labels = {"disk": "on disk", "peer": "in a peer's pool", "remote": "in a remote store"}
    groups = []
    for source, label in labels.items():
        if row := rows.get(f"prefetched_{source}_ttft_ms"):
            bars = (_baseline(pool, row), _bar(after, row), _bar(without, rows[f"no_prefetch_{source}_ttft_ms"]))
            groups.append(Group(label, bars))
    return Chart(title="TTFT of a prompt of 4,097 tokens that left the pool", unit="ms", groups=groups)


def scale(report: Report) -> Chart:
    """How long a coordinator takes to know a fleet, by number of nodes."""
    rows = _by_name(report)
    join, whole = Series("fleet starts", LMKV.colour), Series("coordinator killed and restarted", SECOND.colour)
    counts = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"scale_join_s_(\d+)", name))})
    groups = [
        Group(
            f"{count:,} nodes", (_bar(join, rows[f"scale_join_s_{count}"]), _bar(whole, rows[f"scale_whole_s_{count}"]))
        )
        for count in counts
    ]
    return Chart(title="Time until a coordinator knows every chunk", unit="s", groups=groups)


def shared_map(report: Report) -> Chart:
    """A shared layout map over one for each coordinator."""
    labels = {
        "shared_join_s": "time until both know the fleet",
        "shared_cpu_percent": "processor time of both",
        "shared_news_p50_ms": "time until both know a new chunk, median",
        "shared_whole_s": "time until a restarted one knows the fleet",
    }
    rows = _by_name(report)
    groups = [
        Group(label, (Bar(((LMKV, ratio),)),)) for name, label in labels.items() if (ratio := rows[name].ratio or 0.0)
    ]
    return Chart(title="Shared layout map: ratio to one map for each coordinator", unit="x", groups=groups)


def hybrid(report: Report) -> Chart:
    """Bytes that a prompt moves, by architecture."""
    rows = _by_name(report)
    full = Series("full attention in every layer", ALONE.colour)
    labels = {"stored": "stored", "loaded": "loaded by a hit"}
    groups = []
    for name, architecture in (("gpt_oss", "gpt-oss"), ("gemma3", "Gemma 3"), ("llama4", "Llama 4")):
        for what, label in labels.items():
            row, offloading = rows[f"{name}_{what}_kib"], rows[f"{name}_offloading_{what}_kib"]
            bars = (_bar(LMKV, row), _baseline(VLLM, offloading), _baseline(full, row))
            groups.append(Group(f"{architecture}, {label}", bars))
    return Chart(title="Bytes per 1,000 tokens of a prompt", unit="KiB", groups=groups)


def routing(report: Report) -> Chart:
    """Hit rates by placement and number of engines."""
    rows = _by_name(report)
    placements = {
        "picker": Series("endpoint picker", LMKV.colour),
        "session_affinity": Series("session affinity", SECOND.colour),
        "dynamo": Series("Dynamo's KV router", VLLM.colour),
        "in_turn": Series("round robin", ALONE.colour),
    }
    counts = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"oracle_(\d+)_hit_rate", name))})
    groups = [
        Group(
            f"{count} engines",
            tuple(
                _with_limit(rows[name], series)
                for key, series in placements.items()
                if (name := f"{key}_{count}_hit_rate") in rows
            ),
        )
        for count in counts
    ]
    return Chart(title="Hit tokens of all prompts' tokens", unit="%", groups=groups, limit="oracle placement")


def sglang(report: Report) -> Chart:
    """What a hit in the storage adds to one in SGLang's own KV cache."""
    rows = _by_name(report)
    systems = {
        "lmkv": LMKV,
        "file": Series("SGLang's file backend", VLLM.colour),
        "mooncake": Series("Mooncake's store", LMCACHE.colour),
    }
    groups = [
        Group(
            label,
            tuple(
                _bar(series, rows[name])
                for key, series in systems.items()
                if (name := f"sglang_{key}_{at}_added_ms") in rows
            ),
        )
        for at, label in (("own", "hit in the storage"), ("peer", "hit that another server has stored"))
    ]
    return Chart(title="SGLang: TTFT beyond that of a hit in its own KV cache", unit="ms", groups=groups)


CHARTS: Mapping[str, tuple[str, Callable[[Report], Chart]]] = {
    "ttft-steps": ("data_path", data_path),
    "channels": ("channels", channels),
    "hosts": ("hosts", hosts),
    "kernels-cpu": ("kernels_cpu", kernels_cpu),
    "kernels-gpu": ("kernels_gpu", kernels_gpu),
    "control-plane": ("control_plane", control_plane),
    "doc-qa": ("doc_qa", doc_qa),
    "pd-transfer": ("pd", pd),
    "rivals": ("rivals", rivals),
    "multi-turn": ("multi_turn", multi_turn),
    "agents": ("agents", agents),
    "eviction": ("eviction", eviction),
    "prefetch": ("prefetch", prefetch),
    "scale": ("scale", scale),
    "shared-map": ("shared_map", shared_map),
    "hybrid": ("hybrid", hybrid),
    "routing": ("routing", routing),
    "sglang": ("sglang", sglang),
}
"""By the name of its file in `docs/images`: the benchmark, and the function that makes its chart."""


def _by_name(report: Report) -> dict[str, Row]:
    return {row.name: row for row in report.rows}


def _bar(series: Series, row: Row) -> Bar:
    return Bar(((series, row.value),))


def _baseline(series: Series, row: Row) -> Bar:
    return Bar(((series, row.baseline_value or 0.0),))


def _with_limit(row: Row, series: Series = LMKV) -> Bar:
    return Bar(((series, row.value),), row.baseline_value)


def _both(name: str) -> Iterable[tuple[Series, str]]:
    """The row of this name, and that of LMCache for the same question."""
    lmcache = name.replace("lookup_stream", "lookup")
    return (LMKV, name), (LMCACHE, f"lmcache_{lmcache}")


def _steps(rows: Mapping[str, Row], holder: str) -> Bar:
    parts = [(series, rows.get(f"step_{holder}_{step}_ms")) for step, series in STEPS.items()]
    found = tuple((series, row.value) for series, row in parts if row is not None)
    if not found:
        raise KeyError(f"step_{holder}_...")
    return Bar(found)
