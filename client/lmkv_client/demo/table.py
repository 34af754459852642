"""The table of results that `lmkv demo` prints."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lmkv.units import format_bytes, format_rate
from lmkv_client.demo.measure import CacheTransfer, DemoResult


def make_table(result: DemoResult) -> Table:
    """TTFT, and what was loaded instead of computed; fits into 80 columns."""
    table = Table(
        title=f"A prompt of {result.prompt_tokens:,} tokens, medians of {len(result.rounds)} rounds",
        caption=_caption(*result.engines),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("KV cache", no_wrap=True)
    for heading in ("TTFT", "of cold", "tokens", "size", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    rounds = result.rounds
    peer_same = all(round_.peer.token_ids == round_.cold.token_ids for round_ in rounds)
    own_same = all(round_.own.token_ids == round_.cold.token_ids for round_ in rounds)
    cold_ms = result.cold_ttft_ms
    table.add_row("cold", *_times(cold_ms, cold_ms), "0", "-", "-", "-")
    table.add_row("from peer", *_times(result.peer_ttft_ms, cold_ms), *_amounts(result.from_peer), _same(peer_same))
    table.add_row("own host pool", *_times(result.own_ttft_ms, cold_ms), *_amounts(result.from_own), _same(own_same))
    return table


def _caption(first: str, second: str) -> str:
    own = "own host pool: engine 1 again, after a reset of its prefix cache"
    if first == second == "vLLM":
        return f"cold: engine 1 computes it · from peer: engine 2 loads it from engine 1\n{own}"
    peer = f"from peer: engine 2, {second}, loads it from engine 1"
    return f"cold: engine 1, {first}, computes it\n{peer}\n{own}"


def _times(ttft_ms: float, cold_ms: float) -> tuple[str, str]:
    return f"{ttft_ms:,.0f} ms", f"{100 * ttft_ms / cold_ms:.1f} %"


def _amounts(taken: CacheTransfer) -> tuple[str, str, str]:
    if not taken.tokens:
        return "0", "-", "-"
    return f"{taken.tokens:,}", format_bytes(taken.size_bytes), format_rate(taken.size_bytes, taken.seconds)


def _same(same: bool) -> str:
    return "same" if same else "DIFFERS"
