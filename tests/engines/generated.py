"""Tokens that an engine generates for its clients: the proxy's probes, which may come at any time, do not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmkv_client.demo.endpoint import Endpoint

PROBE_TOKENS = "1.0"
"""Tokens of a probe's prompt; a probe generates one token. No prompt whose answer is counted is that short."""


def token_count(engine: Endpoint) -> float:
    """Tokens that an engine has generated so far, without one for each prompt of one token."""
    probes = engine.metrics(le=PROBE_TOKENS)["vllm:request_prompt_tokens_bucket"]
    while True:  # until no probe comes between the two
        generated = engine.metrics()["vllm:generation_tokens_total"]
        before, probes = probes, engine.metrics(le=PROBE_TOKENS)["vllm:request_prompt_tokens_bucket"]
        if probes == before:
            return generated - probes


@contextmanager
def generating(engine: Endpoint) -> Iterator[list[float]]:
    """Yields a list that has one number at the end: the tokens that the engine has generated in here."""
    before = token_count(engine)
    grown: list[float] = []
    yield grown
    grown.append(token_count(engine) - before)
