"""The charts of parts of lmkv: channels, copies, coordinators, eviction, tiers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.support.bar_chart import Bar, Chart, Group, Series
from benchmarks.support.chart_rows import ALONE, LMCACHE, LMKV, SECOND, VLLM, bar_of, bar_with_limit, by_name, groups_of
from benchmarks.support.meanings import word
from benchmarks.support.policy_table import hit_rates
from benchmarks.support.rows import Report

CHANNELS = ("shm", "nixl", "tcp", "tcp_tls", "ucx", "mooncake")


def channels(report: Report) -> Chart:
    """Throughput of fetches by each channel, beside its limit."""
    fetches = [row for row in report.rows if re.fullmatch(r"[a-z_]+_fetch_vs_\w+", row.name)]
    own_limit = {row.name.partition("_fetch")[0]: row for row in reversed(fetches)}  # the first row of each
    groups = [
        Group(f"{name} (limit: {row.baseline})", (bar_with_limit(LMKV, row),))
        for name in CHANNELS
        if (row := own_limit.get(name))
    ]
    return Chart(title="Fetch from another node, throughput", unit="GB/s", groups=groups, limit="limit of the channel")


def hosts(report: Report) -> Chart:
    """Throughput of fetches from another host by each channel."""
    rows = by_name(report)
    groups = [Group(name, (bar_of(LMKV, rows[f"hosts_{name}_fetch"]),)) for name in ("tcp", "ucx", "nixl", "mooncake")]
    return Chart(title="Fetch from another host, throughput", unit="GB/s", groups=groups)


def kernels_cpu(report: Report) -> Chart:
    """Throughput of the copies between pages and chunks, beside memcpy."""
    labels = {
        "host_*_vs_memcpy": "vLLM's pages, whole tiles",
        "host_*_packed_vs_memcpy": "packed blocks of the CPU backend",
        "host_*_hnd_vs_memcpy": "blocks of 16, heads outside",
        "host_*_nhd_vs_memcpy": "blocks of 16, heads within tokens",
        "host_*_latent_vs_memcpy": "MLA latents",
    }
    copies = {
        "gather": Series("pages to chunks, with checksum", LMKV.colour),
        "scatter": Series("chunks to pages", SECOND.colour),
    }
    groups = groups_of(by_name(report), copies, labels, bar=bar_with_limit)
    return Chart(title="Copies on the host, throughput", unit="GB/s", groups=groups, limit="memcpy")


def kernels_gpu(report: Report) -> Chart:
    """Throughput of stores and loads between pages on a GPU and pinned memory, beside plain copies."""
    copies = {"store": Series("store, with checksum", LMKV.colour), "load": Series("load", SECOND.colour)}
    labels = {
        "gpu_*_staged_vs_memcpy": "through a staging buffer",
        "gpu_*_direct_vs_memcpy": "by the kernel itself",
    }
    groups = groups_of(by_name(report), copies, labels, bar=bar_with_limit)
    return Chart(title="Between a GPU and the pool, throughput", unit="GB/s", groups=groups, limit="plain copy")


def control_plane(report: Report) -> Chart:
    """Latencies of lookups at the coordinator, and at LMCache's controller."""
    labels = {
        "lookup_stream_p50_ms": "40 chunks, stream",
        "lookup_400_p50_ms": "400 chunks, stream",
        "lookup_unary_p50_ms": "40 chunks, unary call",
        "http_lookup_131072_ms": "131,072 tokens, HTTP and JSON",
    }
    rows = by_name(report)
    groups = [
        Group(label, tuple(bar_of(series, rows[row]) for series, row in _both(name) if row in rows))
        for name, label in labels.items()
    ]
    return Chart(title="Lookups among a million chunks, median latency", unit="ms", groups=groups)


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


def scale(report: Report) -> Chart:
    """How long a coordinator takes to know a fleet, by number of nodes."""
    rows = by_name(report)
    starts = {
        "join": Series("fleet starts", LMKV.colour),
        "whole": Series("coordinator killed and restarted", SECOND.colour),
    }
    counts = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"scale_join_s_(\d+)", name))})
    groups = groups_of(rows, starts, {f"scale_*_s_{count}": f"{count:,} nodes" for count in counts})
    return Chart(title="Time until a coordinator knows every chunk", unit="s", groups=groups)


def shared_map(report: Report) -> Chart:
    """A shared layout map over one for each coordinator."""
    labels = {
        "shared_join_s": "time until both know the fleet",
        "shared_cpu_percent": "processor time of both",
        "shared_news_p50_ms": "time until both know a new chunk, median",
        "shared_whole_s": "time until a restarted one knows the fleet",
    }
    rows = by_name(report)
    groups = [
        Group(label, (Bar(((LMKV, ratio),)),)) for name, label in labels.items() if (ratio := rows[name].ratio or 0.0)
    ]
    return Chart(title="Shared layout map: ratio to one map for each coordinator", unit="x", groups=groups)


def tiers_disk(report: Report) -> Chart:
    """Throughput of the disk tier by size of chunks."""
    rows = by_name(report)
    series = {
        "tier": LMKV,
        "encrypted": Series("lmkv, encrypted", SECOND.colour),
        "nixl": Series("lmkv, NIXL", VLLM.colour),
    }
    labels = {
        f"disk_*_{act}_{size}": f"{act}, {word(size)}"
        for size in ("512kib", "2mib", "8mib")
        for act in ("write", "read")
    }
    groups = groups_of(rows, series, labels, bar=bar_with_limit)
    return Chart(title="Disk tier, throughput", unit="GB/s", groups=groups, limit="same files without a tier")


def tiers_remote(report: Report) -> Chart:
    """Processor time of the remote tier by store and size of chunks."""
    rows = by_name(report)
    series = {
        "bare": Series("the store's client alone", ALONE.colour),
        "tier": LMKV,
        "encrypted": Series("lmkv, encrypted", SECOND.colour),
    }
    labels = {
        f"{store}_*_{act}_cpu_{size}": f"{word(store)}, {act}, {word(size)}"
        for store in ("redis", "s3")
        for size in ("1mib", "8mib")
        for act in ("write", "read")
    }
    groups = groups_of(rows, series, labels)
    return Chart(title="Remote tier, processor time of the node", unit="s/GB", groups=groups)


def _both(name: str) -> Iterable[tuple[Series, str]]:
    """The row of this name, and that of LMCache for the same question."""
    lmcache = name.replace("lookup_stream", "lookup")
    return (LMKV, name), (LMCACHE, f"lmcache_{lmcache}")
