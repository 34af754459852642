"""What the demo makes of its measurements."""

from __future__ import annotations

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO

import pytest
from rich.console import Console

from lmkv_client.demo.command import _failure
from lmkv_client.demo.endpoint import Completion, Endpoint
from lmkv_client.demo.measure import CacheTransfer, DemoResult, DemoRound, make_table, taken

NOTHING = CacheTransfer(tokens=0, size_bytes=0, seconds=0.0)


def answer(ttft_seconds: float, token_ids: tuple[int, ...] = (7, 8)) -> Completion:
    return Completion(
        token_ids=token_ids,
        text="",
        finish_reason="length",
        ttft_seconds=ttft_seconds,
        total_seconds=1.0,
        prompt_tokens=4000,
        cached_tokens=0,
    )


def round_of(
    cold: float, *, peer_tokens: tuple[int, ...] = (7, 8), from_peer: CacheTransfer | None = None
) -> DemoRound:
    taken = CacheTransfer(tokens=3840, size_bytes=2 << 30, seconds=0.5)
    return DemoRound(
        cold=answer(cold),
        peer=answer(cold / 10, peer_tokens),
        own=answer(cold / 20),
        from_peer=taken if from_peer is None else from_peer,
        from_own=taken,
    )


class LaggingEngine(BaseHTTPRequestHandler):
    """Publishes the bytes of a fetch a step after its tokens, as an engine does that answers faster than its node."""

    steps = 0

    def do_GET(self) -> None:  # its base's name
        """`/metrics`."""
        lines = ['lmkv:tier_tokens_total{tier="peers"} 512.0'] if self.steps > 0 else []
        lines += ["lmkv:peer_bytes_total 4096.0", "lmkv:peer_seconds_total 0.25"] if self.steps > 1 else []
        self._answer("text/plain", "\n".join([*lines, ""]))

    def do_POST(self) -> None:  # its base's name
        """`/v1/completions`, which takes a step."""
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).steps += 1
        choice = {"index": 0, "text": "", "token_ids": [7], "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        event = json.dumps({"choices": [choice], "usage": usage})
        self._answer("text/event-stream", f"data: {event}\n\ndata: [DONE]\n\n")

    def _answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_what_was_taken_is_read_once_its_counts_are_there() -> None:
    LaggingEngine.steps = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), LaggingEngine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = Endpoint("engine", server.server_port, "model")
        loaded = dataclasses.replace(answer(1.0), cached_tokens=512)
        assert taken(engine, {}, loaded, "peer") == CacheTransfer(tokens=512, size_bytes=4096, seconds=0.25)
        LaggingEngine.steps = 0
        assert taken(engine, {}, answer(1.0), "peer") == NOTHING, "nothing was cached: there is nothing to wait for"
        server.shutdown()


def test_the_numbers_are_medians_over_the_rounds() -> None:
    numbers = DemoResult(rounds=[round_of(2.0), round_of(90.0), round_of(3.0)]).to_json()
    assert numbers["cold_ttft_ms"] == 3000
    assert numbers["peer_ttft_ms"] == 300
    assert numbers["own_ttft_ms"] == 150
    assert numbers["peer_ttft_ratio"] == pytest.approx(0.1)


def test_the_numbers_go_by_the_names_that_others_rely_on() -> None:
    numbers = json.loads(json.dumps(DemoResult(rounds=[round_of(2.0)]).to_json()))
    assert numbers.keys() >= {"cold_ttft_ms", "peer_ttft_ms", "own_ttft_ms", "prompt_tokens", "peer_tokens"}
    assert numbers.keys() >= {"own_tokens", "peer_gib_per_s", "identical"}
    assert numbers["prompt_tokens"] == 4000
    assert numbers["peer_tokens"] == 3840
    assert numbers["peer_gib_per_s"] == 4.0
    assert numbers["identical"] is True


def test_one_different_token_in_one_round_is_a_failure() -> None:
    result = DemoResult(rounds=[round_of(2.0), round_of(2.0, peer_tokens=(7, 9))])
    assert not result.identical
    assert "different completions" in str(_failure(result))


def test_taking_nothing_from_the_peer_is_a_failure() -> None:
    result = DemoResult(rounds=[round_of(2.0), round_of(2.0, from_peer=NOTHING)])
    assert _failure(result) == "engine 2 loaded nothing from engine 1"
    assert _failure(DemoResult(rounds=[round_of(2.0)])) is None


@pytest.mark.parametrize("from_peer", [None, NOTHING])
def test_the_table_fits_80_columns_and_shows_what_was_taken(from_peer: CacheTransfer | None) -> None:
    out = StringIO()
    table = make_table(DemoResult(rounds=[round_of(123.456, peer_tokens=(1,), from_peer=from_peer)]))
    Console(file=out, width=80).print(table)
    text = out.getvalue()
    assert "…" not in text
    assert "123,456 ms" in text
    assert "10.0 %" in text
    assert "DIFFERS" in text
    assert "same" in text


@pytest.mark.parametrize("kinds", [("vLLM", "SGLang"), ("SGLang", "vLLM"), ("SGLang", "SGLang")], ids=str)
def test_the_table_names_the_kinds_of_engines(kinds: tuple[str, str]) -> None:
    out = StringIO()
    unmeasured = CacheTransfer(tokens=3840, size_bytes=2 << 30, seconds=0.0)
    result = DemoResult(rounds=[round_of(2.0, from_peer=unmeasured)], engines=kinds)
    Console(file=out, width=80).print(make_table(result))
    assert f"engine 1, {kinds[0]}, computes it" in out.getvalue()
    assert f"engine 2, {kinds[1]}, loads it" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert result.to_json()["engines"] == list(kinds)
