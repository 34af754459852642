"""The spans of requests in vLLM's real scheduler: what each says, and that every one ends, however its request does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmkv.telemetry import spans
from lmkv.telemetry.otel import OtelTracer
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

MakeEngine = Callable[..., SimulatedEngine]

PROMPT = list(range(3, 203))
HELD = len(PROMPT) // CHUNK * CHUNK


class Book(SimpleSpanProcessor):
    """Spans that were begun, and those that ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        super().__init__(self._exporter)
        self.begun = 0

    def on_start(self, *_: object, **__: object) -> None:
        self.begun += 1

    def take(self) -> list[ReadableSpan]:
        """What has ended since the last time, and that is all that was begun."""
        ended = list(self._exporter.get_finished_spans())
        assert len(ended) == self.begun, f"only these have ended: {[span.name for span in ended]}"
        self._exporter.clear()
        self.begun = 0
        return ended


@pytest.fixture
def book() -> Iterator[Book]:
    book = Book()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(book)
    spans.set_tracer(OtelTracer(provider.get_tracer("test")))
    yield book
    spans.set_tracer(None)


@pytest.fixture
def engine(make_engine: MakeEngine, book: Book) -> SimulatedEngine:
    """An engine whose node holds the prompt, while vLLM has forgotten its pages of it."""
    engine = make_engine()
    engine.serve("filler", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    lookup, store = book.take()
    assert (lookup.name, store.name) == ("lmkv.lookup", "lmkv.store")
    return engine


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("lmkv."): value for name, value in (span.attributes or {}).items()}


def test_a_miss_is_a_lookup_that_found_nothing_and_no_error(make_engine: MakeEngine, book: Book) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    lookup, store = book.take()
    assert attributes_of(lookup) == {
        "asked_tokens": len(PROMPT),
        "own_tokens": 0,
        "peer_instance_id": "",
        "miss_reasons": ("never_stored",),
    }
    assert lookup.status.is_unset
    assert attributes_of(store) == {"stored_tokens": HELD}
    assert store.parent is not None
    assert store.parent.span_id == lookup.get_span_context().span_id  # type: ignore[union-attr]


def test_a_hit_is_a_lookup_and_a_load_that_begins_after_it(engine: SimulatedEngine, book: Book) -> None:
    engine.serve("a", PROMPT)
    lookup, load = book.take()
    assert (lookup.name, load.name) == ("lmkv.lookup", "lmkv.load")
    assert attributes_of(lookup)["own_tokens"] == attributes_of(load)["loaded_tokens"] == HELD
    assert "peers_tokens" not in attributes_of(load)
    assert load.status.is_unset
    assert load.start_time >= lookup.end_time  # type: ignore[operator]


def test_lookups_and_loads_report_their_sources(engine: SimulatedEngine, book: Book) -> None:
    engine.node.move_to_peer()
    engine.node.on_disk, engine.node.in_remote = 2, 1
    engine.serve("a", PROMPT)
    for span in (span for span in book.take() if span.name != "lmkv.store"):
        tokens = [attributes_of(span).get(f"{tier}_tokens", 0) for tier in ("disk", "peers", "remote")]
        assert (span.name, tokens) == (span.name, [2 * CHUNK, HELD - 3 * CHUNK, CHUNK])


def test_a_missing_answer_is_a_timeout(engine: SimulatedEngine, book: Book) -> None:
    engine.node.prompt = False
    engine.serve("a", PROMPT)
    (lookup, *_) = book.take()
    assert attributes_of(lookup)["error.type"] == "timeout"
    assert "lookup_timeout" in (lookup.status.description or "")
    engine.settle()


def test_a_request_that_goes_away_ends_its_lookup(engine: SimulatedEngine, book: Book) -> None:
    engine.node.prompt = False
    engine.add("a", PROMPT)
    engine.abort("a")
    (lookup,) = book.take()
    assert attributes_of(lookup)["error.type"] == "unanswered"
    engine.settle()
    assert book.take() == []


def test_a_short_load_is_reported_as_incomplete(engine: SimulatedEngine, book: Book) -> None:
    engine.node.move_to_peer()
    engine.node.fetches_at_once = False
    engine.add("a", PROMPT)
    engine.step()
    engine.node.fail()
    engine.run("a")
    lookup, load = (span for span in book.take() if span.name != "lmkv.store")
    assert attributes_of(lookup)["peers_tokens"] == HELD
    assert attributes_of(load)["error.type"] == "incomplete"


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("fetches", [True, False])
def test_when_the_node_is_lost_every_span_ends(
    engine: SimulatedEngine, book: Book, silent: bool, fetches: bool
) -> None:
    engine.node.move_to_peer()
    engine.node.fetches_at_once = fetches
    engine.node.prompt = not silent
    engine.add("a", PROMPT)
    engine.step()
    engine.node.lose()
    engine.settle()
    assert {span.name for span in book.take()} >= {"lmkv.lookup"}
