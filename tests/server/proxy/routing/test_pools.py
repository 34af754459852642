"""Which engine is selected for a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.proxy.engine import BOTH, MAX_HEALTH_TIMEOUTS, Engine, EngineModel, PrefixHits
from lmkv_server.proxy.routing.pools import (
    HOLD_FACTOR,
    OVERLOAD,
    REQUEST_TOKENS,
    EnginePool,
    EnginePools,
    HeldTokens,
    SessionAffinity,
    cost_by,
)

POLICIES = ("round_robin", "least_loaded", "kv_aware")


def pool(policy: str, loads: list[int], *, affinity: SessionAffinity | None = None) -> EnginePool:
    engines = []
    for number, load in enumerate(loads):
        engine = Engine(f"http://e-{number}", BOTH)
        engine.mark_healthy()
        engine.in_flight_count = load
        engine.instance_id = f"i-{number}"
        engines.append(engine)
    return EnginePool(engines, cost_by(policy), affinity or SessionAffinity(60.0))


LOADS = st.lists(st.integers(0, 30), min_size=1, max_size=6)
HELD = st.dictionaries(st.integers(0, 7).map("i-{}".format), st.integers(0, 5000))


@given(policy=st.sampled_from(POLICIES), loads=LOADS, held=HELD, out=st.sets(st.integers(0, 5)))
def test_only_healthy_engines_are_selected(policy: str, loads: list[int], held: dict[str, int], out: set[int]) -> None:
    pools = pool(policy, loads)
    for number, engine in enumerate(pools.engines):
        if number in out:
            engine.mark_unhealthy("test")
    chosen = pools.choose(0.0, cached=held)
    assert (chosen is None) == (set(range(len(loads))) <= out)
    assert chosen is None or chosen.is_healthy


@given(
    policy=st.sampled_from(POLICIES),
    loads=LOADS,
    least=HELD,
    more=HELD,
    shares=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    turns=st.integers(0, 4),
    session=st.sampled_from(["", "one"]),
)
def test_a_choice_is_certain_only_if_what_may_be_held_besides_does_not_change_it(
    policy: str,
    loads: list[int],
    least: dict[str, int],
    more: dict[str, int],
    shares: list[float],
    turns: int,
    session: str,
) -> None:
    at_most = {**least, **{one: least.get(one, 0) + count for one, count in more.items()}}
    names = [f"i-{number}" for number in range(8)]
    held = {one: least.get(one, 0) + round(more.get(one, 0) * shares[at]) for at, one in enumerate(names)}
    pools = pool(policy, loads)
    for _ in range(turns):
        pools.choose(0.0, cached={}, session=session)
    excluded = pools.engines[:1] if len(loads) > 1 else ()
    if pools.is_certain(0.0, session=session, cached=least, at_most=at_most, excluded=excluded):
        other = pool(policy, loads)
        for _ in range(turns):
            other.choose(0.0, cached={}, session=session)
        chosen = pools.choose(0.0, cached=least, session=session, excluded=excluded)
        exact = other.choose(0.0, cached=held, session=session, excluded=other.engines[:1] if excluded else ())
        assert chosen is not None
        assert exact is not None
        assert chosen.url == exact.url


def test_a_choice_is_certain_if_no_other_engine_can_hold_as_much() -> None:
    pools = pool("kv_aware", [0, 0, 1])
    first, second, _ = pools.engines
    cached = {"i-0": 500, "i-1": 300}
    assert pools.is_certain(0.0, cached=cached, at_most={"i-0": 900, "i-1": 499, "i-2": 512})
    assert not pools.is_certain(0.0, cached=cached, at_most={"i-0": 900, "i-1": 500})
    assert not pools.is_certain(0.0, cached=cached, at_most={"i-0": 900, "i-2": 513})
    assert pools.is_certain(0.0, cached=cached, at_most={"i-2": 600}, excluded=[first, second])
    assert pools.choose(0.0, cached={}, session="one") is first
    assert pools.is_certain(0.0, session="one", cached=cached, at_most={"i-1": 900})
    first.mark_unhealthy("test")
    assert not pools.is_certain(0.0, session="one", cached=cached, at_most={"i-2": 900})
    assert EnginePool([], cost_by("kv_aware"), SessionAffinity(0.0)).is_certain(0.0, cached={}, at_most={})


@given(loads=LOADS, turns=st.integers(1, 20))
def test_round_robin_selects_every_engine_before_any_engine_again(loads: list[int], turns: int) -> None:
    pools = pool("round_robin", loads)
    chosen = [pools.choose(0.0, cached={}) for _ in range(turns * len(loads))]
    assert all(chosen.count(engine) == turns for engine in pools.engines)


@given(loads=LOADS, held=HELD)
def test_least_loaded_selects_an_engine_with_the_least_load(loads: list[int], held: dict[str, int]) -> None:
    chosen = pool("least_loaded", loads).choose(0.0, cached=held)
    assert chosen is not None
    assert chosen.in_flight_count == min(loads)


@given(loads=LOADS, held=HELD)
def test_kv_aware_weighs_cached_tokens_against_load(loads: list[int], held: dict[str, int]) -> None:
    chosen = pool("kv_aware", loads).choose(0.0, cached=held)
    gains = [
        (HOLD_FACTOR + 1) * held.get(f"i-{number}", 0) - load * REQUEST_TOKENS for number, load in enumerate(loads)
    ]
    assert chosen is not None
    assert gains[int(chosen.url.rpartition("-")[2])] == max(gains)


@given(loads=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_kv_aware_with_nothing_held_is_least_loaded(loads: list[int]) -> None:
    aware, least = pool("kv_aware", loads), pool("least_loaded", loads)
    for _ in range(10):
        one, other = aware.choose(0.0, cached={}), least.choose(0.0, cached={})
        assert one is not None
        assert other is not None
        assert one.url == other.url


def test_a_session_stays_until_its_engine_is_overloaded() -> None:
    pools = pool("least_loaded", [0, 0])
    first = pools.choose(0.0, session="s", cached={})
    assert first is not None
    first.in_flight_count = OVERLOAD - 1
    assert pools.choose(1.0, session="s", cached={}) is first
    first.in_flight_count = OVERLOAD
    moved = pools.choose(2.0, session="s", cached={})
    assert moved is not first
    first.in_flight_count = 0
    assert pools.choose(3.0, session="s", cached={}) is moved, "it is there now"


def test_a_session_leaves_an_engine_that_is_unhealthy_or_excluded() -> None:
    pools = pool("round_robin", [0, 0])
    first = pools.choose(0.0, session="s", cached={})
    assert first is not None
    assert pools.choose(0.0, session="s", cached={}, excluded=[first]) is not first
    first.mark_unhealthy("test")
    assert pools.choose(0.0, session="s", cached={}) is not first


def test_an_engine_is_unhealthy_after_consecutive_health_timeouts() -> None:
    engine = Engine("http://e", BOTH)
    engine.mark_healthy()
    for _ in range(MAX_HEALTH_TIMEOUTS - 1):
        assert not engine.add_health_timeout()
    engine.reset_health_timeouts()
    is_limit = [engine.add_health_timeout() for _ in range(MAX_HEALTH_TIMEOUTS)]
    assert is_limit == [False] * (MAX_HEALTH_TIMEOUTS - 1) + [True]


def test_to_be_excluded_again_for_the_same_reason_is_no_news() -> None:
    engine = Engine("http://e", BOTH)
    engine.mark_healthy()
    assert [engine.mark_unhealthy(why) for why in ("a", "a", "b")] == [True, False, True]


def test_models_are_known_by_name() -> None:
    engine = Engine("http://e", BOTH)
    assert engine.model("any") == EngineModel(name="any")
    base, tuned = EngineModel(name="base", max_token_count=10), EngineModel(name="tuned", parent="base")
    engine.models = (base, tuned)
    assert [engine.model(name) for name in ("tuned", "base", None, "unknown")] == [tuned, base, base, base]


def test_pools_without_healthy_engines_have_a_reason() -> None:
    decode = pool("round_robin", [0])
    pools = EnginePools(decode, None)
    assert pools.unavailable_reason() == ""
    decode.engines[0].mark_unhealthy("it is tired")
    assert pools.unavailable_reason() == "both engine http://e-0: it is tired"


def test_the_least_loaded_engine_is_a_healthy_one() -> None:
    engines = pool("round_robin", [3, 1, 2])
    assert engines.least_loaded() is engines.engines[1]
    engines.engines[1].mark_unhealthy("test")
    assert engines.least_loaded() is engines.engines[2]
    for engine in engines.engines:
        engine.mark_unhealthy("test")
    assert engines.least_loaded() is None


def test_prefill_engines_are_listed_first_and_their_failures_refuse_no_request() -> None:
    prefill, decode = pool("round_robin", [0]), pool("round_robin", [0, 0])
    pools = EnginePools(decode, prefill)
    assert pools.engines == [*prefill.engines, *decode.engines]
    assert EnginePools(decode, None).engines == [*decode.engines]
    prefill.engines[0].mark_unhealthy("test")
    decode.engines[0].mark_unhealthy("one")
    assert pools.unavailable_reason() == ""
    decode.engines[1].mark_unhealthy("other")
    assert pools.unavailable_reason() == (
        "both engine http://e-0: test; both engine http://e-0: one; both engine http://e-1: other"
    )


def test_the_reserve_is_used_only_while_no_other_engine_can_be() -> None:
    prefill = pool("round_robin", [0, 0]).engines
    decode = pool("round_robin", [5, 5]).engines
    engines = EnginePool(decode, cost_by("least_loaded"), SessionAffinity(60.0), reserve=prefill)
    assert {engines.choose(0.0, cached={}) for _ in range(4)} == set(decode)
    assert engines.choose(0.0, cached={}, excluded=decode) in prefill
    for engine in decode:
        engine.mark_unhealthy("test")
    assert engines.least_loaded() in prefill
    assert engines.choose(0.0, session="s", cached={}) in prefill
    decode[0].mark_healthy()
    assert engines.choose(0.0, session="s", cached={}) is decode[0]


def test_a_request_without_a_session_is_with_none() -> None:
    affinity = SessionAffinity(60.0)
    engines = pool("round_robin", [0, 0], affinity=affinity)
    assert engines.choose(0.0, cached={}) is not engines.choose(0.0, cached={})
    assert len(affinity) == 0


def test_an_instance_that_is_not_listed_holds_nothing() -> None:
    engines = pool("kv_aware", [0, 0])
    assert engines.choose(0.0, cached={"i-1": 1}) is engines.engines[1]
    assert engines.choose(0.0, cached={"i-1": 0}) is engines.engines[0], "it was selected less recently"


STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["x", "y"]), st.floats(0.0, 5.0)), max_size=40)


def test_a_session_is_forgotten_some_time_after_its_last_request() -> None:
    sessions = SessionAffinity(10.0)
    sessions.assign("s", "x", 0.0)
    sessions.assign("s", "x", 5.0)
    assert sessions.get("s", 14.9) == "x"
    assert sessions.get("s", 15.0) is None


def test_without_a_time_nothing_is_remembered() -> None:
    sessions = SessionAffinity(0.0)
    sessions.assign("s", "x", 0.0)
    assert len(sessions) == 0


@given(STEPS)
def test_it_holds_what_was_last_said_within_its_bounds(steps: list[tuple[str, str, float]]) -> None:
    sessions, now = SessionAffinity(8.0, limit=3), 0.0
    last: dict[str, tuple[str, float]] = {}
    for session, url, pause in steps:
        now += pause
        sessions.assign(session, url, now)
        last.pop(session, None)
        last[session] = (url, now)
        assert len(sessions) <= 3
        kept = dict(list(last.items())[-3:])
        for name in "abcdef":
            expected = kept[name][0] if name in kept and now < kept[name][1] + 8.0 else None
            assert sessions.get(name, now) == expected


def test_expired_sessions_are_removed_with_the_next_request() -> None:
    sessions = SessionAffinity(0.5)
    sessions.assign("s", "x", 1.0)
    assert sessions.get("s", 1.25) == "x"
    sessions.assign("t", "x", 1.25)
    assert len(sessions) == 2
    sessions.assign("u", "x", 1.5)
    assert len(sessions) == 2, "the first one has just expired"


# ---- the expected time to the first token


def rated(*rates: float) -> EnginePool:
    """Engines that compute prompts at these rates, in tokens per second; 0: not known."""
    pools = pool("kv_aware", [0] * len(rates))
    for engine, rate in zip(pools.engines, rates, strict=True):
        engine.queue.tokens_per_second = rate
    return pools


def test_a_prompt_goes_where_it_is_computed_first_though_another_engine_holds_some_of_it() -> None:
    pools = rated(1000, 1000)
    holder, other = pools.engines
    held = {"i-0": 500}
    assert pools.choose(0.0, cached=held, token_count=1000) is holder
    holder.queue.add((HOLD_FACTOR + 1) * 500 + 100, 0.0)
    assert pools.choose(0.0, cached=held, token_count=1000) is other
    assert pools.choose(0.5, cached=held, token_count=1000) is holder, "it has computed some meanwhile"


def test_a_slow_engine_gets_fewer_prompts_and_an_unknown_one_is_taken_for_a_usual_one() -> None:
    pools = rated(1000, 4000, 0)
    slow, fast, unknown = pools.engines
    assert pools.choose(0.0, cached={"i-0": 100}, token_count=1000) is fast
    assert pools.choose(0.0, cached={"i-0": 900}, token_count=1000) is slow
    assert pools.choose(0.0, cached={"i-2": 900}, token_count=1000) is unknown
    fast.mark_unhealthy("test")
    assert pools.choose(0.0, cached={}, token_count=1000) is slow, "it was selected less recently"


def test_a_stalled_engine_gets_no_prompts_until_it_answers() -> None:
    pools = rated(1000, 1000)
    stalled, other = pools.engines
    queued = stalled.queue.add(100, 0.0)
    queued.is_followed = True
    held = {"i-0": 400}
    assert pools.choose(0.1, cached=held, token_count=1000) is stalled
    assert pools.choose(5.0, cached=held, token_count=1000) is other
    stalled.queue.remove(queued, 5.0)
    assert pools.choose(5.0, cached=held, token_count=1000) is stalled


def test_what_a_peer_holds_is_fetched_while_the_prompt_waits_where_that_is_faster() -> None:
    pools = rated(1000, 1000, 1000)
    holder, near, far = pools.engines
    holder.queue.add(20_000, 0.0)
    near.queue.add(200, 0.0)
    held = {"i-0": 900}
    assert pools.choose(0.0, cached=held, token_count=1000) is far, "it has no other prompts"
    near.queue.pulled_per_second = 4500
    assert pools.choose(0.0, cached=held, token_count=1000) is near, "it has the prompt when it has computed the other"
    near.queue.pulled_per_second = 600
    assert pools.choose(0.0, cached=held, token_count=1000) is far, "to compute is faster"


def test_cold_prompts_go_to_engines_that_have_kept_few_lately() -> None:
    pools = rated(1000, 900)
    fast, slow = pools.engines
    assert pools.choose(0.0, cached={}, token_count=1000) is fast
    fast.queue.remove(fast.queue.add(100_000, 0.0), 100.0)
    assert pools.choose(100.0, cached={}, token_count=1000) is slow
    assert pools.choose(100.0, cached={"i-0": 100}, token_count=1000) is slow
    assert pools.choose(100.0, cached={"i-0": 900}, token_count=1000) is fast, "what it holds counts for more"
    assert pools.choose(3000.0, cached={}, token_count=1000) is fast, "that was long ago"


def test_prompts_whose_first_token_is_not_seen_are_taken_for_computed_in_time() -> None:
    queue = Engine("http://a", BOTH).queue
    first, second = queue.add(1000, 0.0), queue.add(500, 0.0)
    assert queue.tokens_ahead(100.0) == 1500, "how fast it is is not known"
    queue.tokens_per_second = 1000.0
    assert queue.tokens_ahead(0.5) == 1000
    assert queue.tokens_ahead(1.25) == 250
    queue.remove(first, 1.25)  # it has left before
    assert queue.tokens_ahead(1.25) == 250
    assert queue.tokens_ahead(2.0) == len(queue) == 0
    queue.remove(second, 2.0)
    third = queue.add(200, 5.0)
    assert queue.tokens_ahead(5.0) == 200
    queue.remove(third, 5.1)
    assert len(queue) == 0


def test_an_engines_rates_are_what_it_has_computed_and_fetched_since_its_metrics_were_read_last() -> None:
    engine = Engine("http://a", BOTH)
    engine.take_hits(PrefixHits(asked_tokens=5000, own_tokens=1000, external_tokens=2000, prefill_seconds=2.0))
    assert engine.queue.tokens_per_second == 1000
    assert engine.queue.pulled_per_second == 0
    later = PrefixHits(
        asked_tokens=6000,
        own_tokens=1000,
        external_tokens=2000,
        prefill_seconds=4.0,
        pulled_tokens=900,
        pull_seconds=0.5,
    )
    engine.take_hits(later)
    assert engine.queue.tokens_per_second == 500
    assert engine.queue.pulled_per_second == 1800
    for hits in (engine.hits, None, PrefixHits(asked_tokens=10, own_tokens=10, external_tokens=0)):
        engine.take_hits(hits)
        assert engine.queue.tokens_per_second == 500, "nothing was computed"
        assert engine.queue.pulled_per_second == 1800, "nothing was fetched"


def test_a_request_counts_the_tokens_that_its_engine_does_not_hold() -> None:
    engine = pool("kv_aware", [0]).engines[0]
    assert HeldTokens({"i-0": 300}, 1000).uncached_by(engine) == 700
    assert HeldTokens({"i-0": 300}).uncached_by(engine) == 0, "its length is not known"
    with engine.count_request(700) as queued:
        assert (engine.in_flight_count, len(engine.queue), queued.token_count) == (1, 1, 700)
    assert (engine.in_flight_count, len(engine.queue)) == (0, 0)
