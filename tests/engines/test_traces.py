"""One trace from a request to a real vLLM server over lookup, fetch and load, at a real OTLP receiver."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import EngineProcess
from tests.engines.faults import HEAL_SECONDS
from tests.engines.llm import CALM, make_prompt
from tests.lmkv.telemetry.receiver import Received, Receiver, receiving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = make_prompt(7, 1000)
HELD_TOKENS = 768
STORING, LOADING = "1af7651916cd43dd8448eb211c80319c", "2af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
LOOKUP, ACQUIRE = "lmkv.internal.v1.LookupService/Lookup", "lmkv.v1.PeerService/Acquire"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The receiver of all exporters; it outlives them."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path, receiver: Receiver) -> Iterator[Cluster]:
    """Two servers that trace, and a coordinator."""
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        cluster = Cluster(Path(folder), tiny_model, logs=tmp_path, settings=settings | receiver.environment)
        assert cluster.coordinator is not None
        cluster.coordinator.environment |= receiver.environment
        with cluster:
            for name in ("engine-1", "engine-2"):
                cluster.add_engine(
                    name,
                    environment={"OTEL_SERVICE_NAME": name},
                    extra_arguments=["--otlp-traces-endpoint", receiver.endpoint],
                )
            cluster.start_engines()
            yield cluster


def complete(engine: EngineProcess, trace_id: str) -> None:
    """One request of a client that traces."""
    answer = httpx.post(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        json={"model": engine.model.name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0},
        headers={"traceparent": f"00-{trace_id}-{CLIENT}-01"},
        timeout=120,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text


def test_a_request_is_one_trace_from_the_client_to_the_peer_that_gives_the_bytes(
    cluster: Cluster, receiver: Receiver
) -> None:
    assert cluster.coordinator is not None
    complete(cluster.engines["engine-1"], STORING)
    cluster.coordinator.wait_for_holder(PROMPT, "engine-1", HELD_TOKENS, HEAL_SECONDS)
    complete(cluster.engines["engine-2"], LOADING)

    def span(service: str, name: str, **fields: str) -> Received:
        return receiver.span(service, name, trace_id=LOADING, **fields)

    assert span("engine-2", "llm_request").parent_id == CLIENT  # vLLM's own
    lookup, load = span("engine-2", "lmkv.lookup"), span("engine-2", "lmkv.load")
    node_lookup = span("lmkv-node", "lmkv.lookup")
    asked, answered = span("lmkv-node", LOOKUP), span("lmkv-coordinator", LOOKUP)
    fetch = span("lmkv-node", "lmkv.fetch")
    acquiring = span("lmkv-node", ACQUIRE, instance_id="engine-2")
    acquired = span("lmkv-node", ACQUIRE, instance_id="engine-1")
    for child, parent_id in (
        (lookup, CLIENT),
        (node_lookup, lookup.span_id),
        (asked, node_lookup.span_id),
        (answered, asked.span_id),
        (load, CLIENT),
        (fetch, load.span_id),
        (acquiring, fetch.span_id),
        (acquired, acquiring.span_id),
    ):
        assert (child.parent_id, child.failed) == (parent_id, False), child
    assert lookup.attributes["lmkv.peers_tokens"] == HELD_TOKENS
    assert load.attributes["lmkv.loaded_tokens"] == HELD_TOKENS
    assert load.attributes["lmkv.peer_instance_id"] == "engine-1"
    for service in ("engine-1", "lmkv-node"):
        missed = receiver.span(service, "lmkv.lookup", trace_id=STORING)
        assert missed.attributes["lmkv.miss_reasons"] == ("never_stored",)
    store = receiver.span("engine-1", "lmkv.store", trace_id=STORING)
    assert store.parent_id == CLIENT
    assert store.attributes["lmkv.stored_tokens"] == HELD_TOKENS
