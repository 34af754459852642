"""What the chart of each benchmark shows, out of its report; `bar_chart` draws it, `benchmarks.tables` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from benchmarks.support import part_charts
from benchmarks.support.bar_chart import Bar, Chart, Group, Series
from benchmarks.support.chart_rows import (
    ALONE,
    LMCACHE,
    LMKV,
    NIXL,
    SECOND,
    VLLM,
    bar_of,
    bar_with_limit,
    baseline_of,
    by_name,
    groups_of,
)
from benchmarks.support.rows import Report, Row

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
    rows = by_name(report)
    groups = [Group(label, (_steps(rows, holder),)) for holder, label in HOLDERS.items()]
    cold = rows["ttft_cold_ms_4000"].value
    title = f"TTFT of a hit, 4,000 tokens (cache miss: {cold:,.0f} ms)"
    return Chart(title=title, unit="ms", groups=groups)


def engines_gpu(report: Report) -> Chart:
    """TTFT by where the prompt is."""
    rows = by_name(report)
    systems = {
        "prefix_hit": Series("hit in vLLM's prefix cache", VLLM.colour),
        "own": Series("hit in the pool", LMKV.colour),
    }
    systems |= {"peer": Series("hit in a peer's pool", SECOND.colour), "cold": Series("cache miss", ALONE.colour)}
    lengths = sorted(int(name.rpartition("_")[2]) for name in rows if name.startswith("ttft_own_ms_"))
    labels = {f"ttft_*_ms_{length}": f"{length:,} tokens" for length in lengths}
    groups = groups_of(rows, systems, labels)
    return Chart(title=f"TTFT on one {report.settings['gpu']}, 8 billion parameters", unit="ms", groups=groups)


def doc_qa(report: Report) -> Chart:
    """Mean TTFT of each round."""
    rows, miss = by_name(report), Series("cache miss", ALONE.colour)
    hit = Series("cache hit", LMKV.colour)
    first = rows["doc_qa_ttft_s"].baseline_value
    assert first is not None
    labels = {
        "doc_qa_ttft_s": "engine 2 reads the same documents",
        "doc_qa_query_ttft_s": "engine 2 answers questions",
        "doc_qa_own_query_ttft_s": "engine 1 answers questions",
    }
    groups = [Group("engine 1 reads the documents", (Bar(((miss, first),)),))]
    groups += [Group(label, (bar_of(hit, rows[name]),)) for name, label in labels.items()]
    return Chart(title="Documents, mean TTFT", unit="s", groups=groups)


def pd(report: Report) -> Chart:
    """What the transfer adds to the latency of a request."""
    rows = by_name(report)
    groups = []
    for tokens, suffix in ((2048, ""), (4096, "_4096")):
        nixl, lmcache = rows[f"pd_transfer_vs_nixlconnector{suffix}"], rows[f"pd_transfer_vs_lmcache{suffix}"]
        bars = (bar_of(LMKV, nixl), baseline_of(NIXL, nixl), baseline_of(LMCACHE, lmcache))
        groups.append(Group(f"{tokens:,} tokens", bars))
    return Chart(title="Disaggregated prefill: latency that the transfer adds", unit="ms", groups=groups)


def multi_turn(report: Report) -> Chart:
    """TTFT by turn of a chat."""
    rows = by_name(report)
    hinted = Series("lmkv with hints", "#8b6fc8")
    systems = {"alone": ALONE, "lmkv": LMKV, "lmkv_hints": hinted, "vllm_offload": VLLM, "lmcache": LMCACHE}
    turns = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"\w+_turn_(\d+)_ms", name))})
    labels = {f"*_turn_{turn}_ms": f"turn {turn}" for turn in turns}
    groups = groups_of(rows, systems, labels, skips_missing=True)
    title = f"TTFT by turn, {report.settings['users']} chats at a time"
    return Chart(title=title, unit="ms", groups=groups)


def agents(report: Report) -> Chart:
    """TTFT of agents' requests."""
    rows = by_name(report)
    systems = {"alone": ALONE, "lmkv": LMKV, "vllm_offload": VLLM, "lmcache": LMCACHE}
    routed = {"round_robin": Series("lmkv, two engines in turn", "#8b6fc8"), "kv_aware": LMKV}
    groups = [
        group
        for percent, label in (("p50", "median"), ("p99", "p99"))
        for chosen, engines in ((systems, "one engine"), (routed, "two engines"))
        for group in groups_of(rows, chosen, {f"*_ttft_{percent}_ms": f"{label}, {engines}"}, skips_missing=True)
        if group.bars
    ]
    return Chart(title=f"TTFT, {report.settings['sessions']} sessions of coding agents", unit="ms", groups=groups)


def prefetch(report: Report) -> Chart:
    """TTFT after a pause, with and without a prefetch."""
    rows = by_name(report)
    pool, after = Series("hit in the pool", VLLM.colour), Series("after a prefetch", LMKV.colour)
    without = Series("without a prefetch", ALONE.colour)
    labels = {"disk": "on disk", "peer": "in a peer's pool", "remote": "in a remote store"}
    groups = []
    for source, label in labels.items():
        if row := rows.get(f"prefetched_{source}_ttft_ms"):
            bars = [baseline_of(pool, row), bar_of(after, row), bar_of(without, rows[f"no_prefetch_{source}_ttft_ms"])]
            if kvcr := rows.get(f"kvcr_{source}_ttft_ms"):
                bars.append(bar_of(Series("KVCR", LMCACHE.colour), kvcr))
            groups.append(Group(label, tuple(bars)))
    return Chart(title="TTFT of a prompt of 4,097 tokens that left the pool", unit="ms", groups=groups)


def encoder(report: Report) -> Chart:
    """TTFT of a prompt with a picture, encoded and loaded."""
    rows = by_name(report)
    encoded, loaded = Series("encoded", ALONE.colour), Series("loaded", LMKV.colour)
    groups = [Group("without a connector", (baseline_of(encoded, rows["encoder_miss_ms"]),))]
    for label, miss, hits in (
        ("lmkv: encoded; in its node; in a peer's", "encoder_miss_ms", ("encoder_own_hit_ms", "encoder_peer_hit_ms")),
        ("vLLM's ECExampleConnector", "encoder_files_miss_ms", ("encoder_files_hit_ms",)),
    ):
        groups.append(Group(label, (bar_of(encoded, rows[miss]), *(bar_of(loaded, rows[hit]) for hit in hits))))
    return Chart(title="TTFT of a prompt with a picture", unit="ms", groups=groups)


def salts(report: Report) -> Chart:
    """TTFT of the prompts that a tenant sends, by policy."""
    rows = by_name(report)
    kinds = {
        "cold": Series("new prompt", ALONE.colour),
        "other": Series("prompt of another tenant", LMKV.colour),
        "own": Series("own prompt", VLLM.colour),
    }
    labels = {f"{policy}_*_ttft_ms": f"policy {policy}" for policy in ("tenant", "none")}
    groups = groups_of(rows, kinds, labels)
    return Chart(title="TTFT behind a proxy that derives salts", unit="ms", groups=groups)


def hybrid(report: Report) -> Chart:
    """Bytes that a prompt moves, by architecture."""
    rows = by_name(report)
    full = Series("full attention in every layer", ALONE.colour)
    labels = {"stored": "stored", "loaded": "loaded by a hit"}
    groups = []
    for name, architecture in (("gpt_oss", "gpt-oss"), ("gemma3", "Gemma 3"), ("llama4", "Llama 4")):
        for what, label in labels.items():
            row, offloading = rows[f"{name}_{what}_kib"], rows[f"{name}_offloading_{what}_kib"]
            bars = (bar_of(LMKV, row), baseline_of(VLLM, offloading), baseline_of(full, row))
            groups.append(Group(f"{architecture}, {label}", bars))
    return Chart(title="Bytes per 1,000 tokens of a prompt", unit="KiB", groups=groups)


def routing(report: Report) -> Chart:
    """Hit rates by placement and number of engines."""
    rows = by_name(report)
    placements = {
        "picker": Series("endpoint picker", LMKV.colour),
        "session_affinity": Series("session affinity", SECOND.colour),
        "dynamo": Series("Dynamo's KV router", VLLM.colour),
        "in_turn": Series("round robin", ALONE.colour),
    }
    counts = sorted({int(found[1]) for name in rows if (found := re.fullmatch(r"oracle_(\d+)_hit_rate", name))})
    labels = {f"*_{count}_hit_rate": f"{count} engines" for count in counts}
    groups = groups_of(rows, placements, labels, bar=bar_with_limit, skips_missing=True)
    return Chart(title="Hit tokens of all prompts' tokens", unit="%", groups=groups, limit="oracle placement")


def sglang(report: Report) -> Chart:
    """What a hit in the storage adds to one in SGLang's own KV cache."""
    rows = by_name(report)
    systems = {
        "lmkv": LMKV,
        "file": Series("SGLang's file backend", VLLM.colour),
        "mooncake": Series("Mooncake's store", LMCACHE.colour),
    }
    labels = {
        "sglang_*_own_added_ms": "hit in the storage",
        "sglang_*_peer_added_ms": "hit that another server has stored",
    }
    groups = groups_of(rows, systems, labels, skips_missing=True)
    return Chart(title="SGLang: TTFT beyond that of a hit in its own KV cache", unit="ms", groups=groups)


CHARTS: Mapping[str, tuple[str, Callable[[Report], Chart]]] = {
    "ttft-steps": ("data_path", data_path),
    "channels": ("channels", part_charts.channels),
    "hosts": ("hosts", part_charts.hosts),
    "kernels-cpu": ("kernels_cpu", part_charts.kernels_cpu),
    "engines-gpu": ("engines_gpu", engines_gpu),
    "kernels-gpu": ("kernels_gpu", part_charts.kernels_gpu),
    "control-plane": ("control_plane", part_charts.control_plane),
    "doc-qa": ("doc_qa", doc_qa),
    "pd-transfer": ("pd", pd),
    "multi-turn": ("multi_turn", multi_turn),
    "agents": ("agents", agents),
    "eviction": ("eviction", part_charts.eviction),
    "prefetch": ("prefetch", prefetch),
    "encoder": ("encoder", encoder),
    "salts": ("salts", salts),
    "scale": ("scale", part_charts.scale),
    "shared-map": ("shared_map", part_charts.shared_map),
    "tiers-disk": ("tiers", part_charts.tiers_disk),
    "tiers-remote": ("tiers", part_charts.tiers_remote),
    "hybrid": ("hybrid", hybrid),
    "routing": ("routing", routing),
    "sglang": ("sglang", sglang),
}
"""By the name of its file in `docs/images`: the benchmark, and the function that makes its chart."""


def _steps(rows: Mapping[str, Row], holder: str) -> Bar:
    parts = [(series, rows.get(f"step_{holder}_{step}_ms")) for step, series in STEPS.items()]
    found = tuple((series, row.value) for series, row in parts if row is not None)
    if not found:
        raise KeyError(f"step_{holder}_...")
    return Bar(found)
